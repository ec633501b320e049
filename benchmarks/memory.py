"""Memory of the engine, part by part: `python -m benchmarks.memory --json [--trace FILE]`.

`fragmentation_percent`: KV memory reserved without a live token, on replayed traces (those of `benchmarks/data` unless --trace gives
others) at the chat profile's block size; `--page-tokens 128` is what an NPU's kernel asks for. Traces: Mooncake's JSON lines, whose equal
blocks are shared, or Azure's CSV of arrival, context and generated tokens. `kv_update_saved_percent`: time of a KV update beside
transformers' DynamicCache. `peak_memory`: of a whole run, split into weights, KV, activations and scratch. `int8_heads`: see
`benchmarks.int8_heads`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.traces import TraceError, die

ROOT = Path(__file__).parents[1]
TRACES = sorted((Path(__file__).parent / "data").glob("*_200.*"))
SMOLLM2 = Path.home() / ".cache" / "npufleet" / "models" / "smollm2-135m-instruct"
"""Where `tools/smollm2.py` is told to write by the demo."""


def _fragmentation(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.fragmentation import measure_fragmentation

    try:
        return measure_fragmentation(
            arguments.trace or TRACES, arguments.requests, arguments.block_tokens, arguments.page_tokens or arguments.block_tokens
        )
    except TraceError as error:
        die(error)


def _kv_update(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.kv_update import QUICK_SHAPES, SHAPES, measure_kv_update

    return measure_kv_update(QUICK_SHAPES if arguments.quick else SHAPES)


def _peak_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.peak_memory import measure_peak_memory

    if arguments.model is not None:
        return measure_peak_memory(arguments.model)
    if SMOLLM2.is_dir() and not arguments.quick:
        return measure_peak_memory(SMOLLM2)
    with tempfile.TemporaryDirectory(prefix="peak-memory-") as scratch:
        model = Path(scratch) / "tiny"
        writer = [sys.executable, str(ROOT / "tests" / "support" / "tiny_model.py"), str(model)]
        subprocess.run(writer, check=True, stdout=subprocess.DEVNULL)
        return measure_peak_memory(model)


def _int8_heads(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.int8_heads import TEXT_TOKENS, measure
    from benchmarks.real_text import smollm2

    return {} if arguments.quick else {"int8_heads": measure(arguments.model or smollm2(), TEXT_TOKENS, arguments.threads)}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fragmentation": _fragmentation,
    "kv_update": _kv_update,
    "peak_memory": _peak_memory,
    "int8_heads": _int8_heads,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help=f"comma-separated, of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a request trace instead; may be given several times")
    parser.add_argument("--requests", type=int, default=200, help="requests of each trace to replay (default: 200)")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of a block (default: 16, the chat profile's)")
    parser.add_argument("--page-tokens", type=int, help="tokens of a kernel's page (default: one block)")
    parser.add_argument("--model", type=Path, help="folder of a model (default: SmolLM2 where it is cached, else a tiny random one)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads")
    parser.add_argument("--quick", action="store_true", help="small shapes and the tiny model: shows that it works, measures little")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error(f"--requests: {arguments.requests} replays nothing: give at least 1")

    import torch

    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {}
    for part in arguments.parts:
        result.update(PARTS[part](arguments))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}: {json.dumps(value, indent=1)}")


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
