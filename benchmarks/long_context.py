"""Time and peak memory of long prompts in npufleet's engine and in transformers: `python -m benchmarks.long_context --json`.

Random models of two sizes: tiny (64 wide, 2 layers) and that of SmolLM2-135M. Every figure comes from a process of its own, which loads the
model, forgets its peak, computes one prompt and a few tokens, and tells its new peak. `memory_mib` is that peak less what was held after
loading. `memory_growth` is the exponent p of memory ~ length^p between the shortest and the longest prompt: 1 is linear, 2 is quadratic.
Prompts get longer until `--minutes` are used up: one that would take longer than what is left, by the time of the one before it and the
square of the length, is left out, and `skipped` says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
NEW_TOKENS = 8
CHUNK_TOKENS = 2048
"""Tokens of a step in npufleet; transformers computes a prompt at once."""
POSITIONS = 131072
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"max_position_embeddings": POSITIONS},
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": POSITIONS,
    },
}
DEFAULT_MINUTES = 20.0
PEERS = ("npufleet", "transformers")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One prompt in one engine."""

    model: str
    engine: str
    prompt_tokens: int
    prefill_seconds: float
    decode_ms_per_token: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that was left out."""

    model: str
    engine: str
    prompt_tokens: int
    reason: str


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--models", type=_names(MODELS), default=list(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--engines", type=_names(PEERS), default=list(PEERS), help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--lengths", type=_lengths, help="comma-separated tokens of the prompts, for every model")
    minutes = f"time for all prompts together (default: {DEFAULT_MINUTES:g}; about an hour takes all on 2 cores)"
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help=minutes)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads of each engine")
    parser.add_argument("--child", nargs=4, metavar=("FOLDER", "MODEL", "ENGINE", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, model, engine, tokens = arguments.child
        print(json.dumps(asdict(_measure(Path(folder), model, engine, int(tokens), arguments.threads))))
        return
    with tempfile.TemporaryDirectory(prefix="long-context-") as scratch:
        found, skipped = _run(Path(scratch), arguments)
    growth = _growth(found)
    if arguments.json:
        settings = {"threads": arguments.threads, "chunk_tokens": CHUNK_TOKENS, "new_tokens": NEW_TOKENS, "dtype": "float32"}
        measurements, left_out = [asdict(one) for one in found], [asdict(one) for one in skipped]
        print(json.dumps({"settings": settings, "measurements": measurements, "skipped": left_out, "memory_growth": growth}, indent=1))
        return
    for one in found:
        times = f"prefill {one.prefill_seconds:8.2f} s  decode {one.decode_ms_per_token:8.2f} ms/token"
        print(f"{one.model:8} {one.engine:13} {one.prompt_tokens:6} tokens  {times}  memory {one.memory_mib:8.1f} MiB")
    for out in skipped:
        print(f"{out.model:8} {out.engine:13} {out.prompt_tokens:6} tokens  left out: {out.reason}")
    print(f"memory grows as length^p, p = {growth}")


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from error
    if any(not 1 <= length <= POSITIONS - NEW_TOKENS for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r}: lengths lie between 1 and {POSITIONS - NEW_TOKENS}")
    return lengths


def _run(scratch: Path, arguments: argparse.Namespace) -> tuple[list[Measurement], list[Skipped]]:
    """Every model and engine, the short prompts first."""
    for model in arguments.models:
        writer = [sys.executable, str(ROOT / "tests" / "support" / "tiny_model.py"), str(scratch / model)]
        subprocess.run([*writer, "--config", json.dumps(MODELS[model])], check=True, stdout=subprocess.DEVNULL)
    found: list[Measurement] = []
    skipped: list[Skipped] = []
    took: dict[tuple[str, str], tuple[int, float]] = {}
    ends = time.monotonic() + 60 * arguments.minutes
    for length in arguments.lengths or LENGTHS:
        for model in arguments.models:
            for engine in arguments.engines:
                shorter, seconds = took.get((model, engine), (length, 0.0))
                expected, left = seconds * (length / shorter) ** 2, ends - time.monotonic()
                if expected > left:
                    reason = (
                        f"would take about {expected / 60:.1f} minutes, {max(left, 0) / 60:.1f} of --minutes {arguments.minutes:g} are left"
                    )
                    skipped.append(Skipped(model, engine, length, reason))
                    continue
                print(f"{model} {engine} {length} tokens", file=sys.stderr)
                began = time.monotonic()
                found.append(_run_child(scratch / model, model, engine, length, arguments.threads))
                took[model, engine] = (length, time.monotonic() - began)
    return found, skipped


def _run_child(folder: Path, model: str, engine: str, length: int, threads: int) -> Measurement:
    child = [sys.executable, "-m", "benchmarks.long_context", "--threads", str(threads)]
    child += ["--child", str(folder), model, engine, str(length)]
    done = subprocess.run(child, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def _growth(found: list[Measurement]) -> dict[str, dict[str, float]]:
    """Exponent of memory over length for each model and engine that was measured at two lengths or more."""
    growth: dict[str, dict[str, float]] = {}
    for model, engine in {(one.model, one.engine): None for one in found}:
        same = sorted((one for one in found if (one.model, one.engine) == (model, engine)), key=lambda one: one.prompt_tokens)
        first, last = same[0], same[-1]
        if first.prompt_tokens < last.prompt_tokens and first.memory_mib > 0 and last.memory_mib > 0:
            power = math.log(last.memory_mib / first.memory_mib) / math.log(last.prompt_tokens / first.prompt_tokens)
            growth.setdefault(model, {})[engine] = round(power, 2)
    return growth


def _measure(folder: Path, model: str, engine: str, length: int, threads: int) -> Measurement:
    prompt = [3 + (17 * i + i // 7) % 250 for i in range(length)]
    run = _run_npufleet if engine == "npufleet" else _run_transformers
    seconds, peak_bytes = run(folder, prompt, threads)
    decode = (seconds[-1] - seconds[0]) / (len(seconds) - 1)
    return Measurement(model, engine, length, round(seconds[0], 3), round(decode * 1000, 3), round(peak_bytes / 2**20, 1))


def _run_npufleet(folder: Path, prompt: list[int], threads: int) -> tuple[list[float], int]:
    """(seconds from the start until each token, bytes held at the peak beyond what was held after loading)."""
    from npufleet_api.settings import EngineSettings
    from npufleet_pod.engine.engine import Engine
    from npufleet_pod.engine.loading import load_engine
    from npufleet_pod.engine.model_files import inspect_model
    from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams, TokenOutput

    settings = EngineSettings.model_validate(
        {
            "model_path": str(folder),
            "served_name": "m",
            "device": "CPU",
            "dtype": "Float32",
            "max_model_length": len(prompt) + NEW_TOKENS,
            "max_num_sequences": 1,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "cpu_threads": threads,
        }
    )
    files = inspect_model(settings)
    stop = StopParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    request = GenerationRequest("r", tuple(prompt), stop, SamplingParams(temperature=0))

    async def run() -> tuple[list[float], int]:
        engine = Engine(lambda keep_going: load_engine(settings, files, keep_going), _Silent(), settings.seed)
        engine.start()
        try:
            await engine.wait_ready()
            held = _forget_peak()
            started = time.perf_counter()
            seconds = []
            with engine.submit([request]) as generation:
                while not generation.finished:
                    _, output = await generation.next()
                    if not isinstance(output, TokenOutput):
                        raise SystemExit(f"npufleet failed at {len(prompt)} tokens: {output}")
                    seconds.append(time.perf_counter() - started)
            return seconds, _peak() - held
        finally:
            await engine.stop()

    return asyncio.run(run())


class _Silent:
    """An observer that forgets."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def _run_transformers(folder: Path, prompt: list[int], threads: int) -> tuple[list[float], int]:
    """As `_run_npufleet`, by transformers' own attention and cache, without its generation loop."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers leaves it without annotations
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([[3] * 32]), use_cache=True, logits_to_keep=1)
        held = _forget_peak()
        started = time.perf_counter()
        seconds = []
        ids, cache = torch.tensor([prompt]), None
        for _ in range(NEW_TOKENS):
            output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            cache, ids = output.cache, output.logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - started)
    return seconds, _peak() - held


def _forget_peak() -> int:
    """Resident bytes, from which the kernel now counts the process's peak anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Most resident bytes that this process had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM: run this on Linux")


if __name__ == "__main__":
    main()
