"""What each choice of types costs, side by side: `python -m benchmarks.precision --json`.

For each, `perplexity_loss_percent` against all of it in float32 with its standard error, on files of this repository that the output
names, with `weights_mib` and `kv_bytes_per_token` of the model in those types. Every row loads the checkpoint in its types and scores the
same tokens; INT8 KV is that of the heads that the calibration of `benchmarks.int8_heads` chooses, or of all heads. Weights are held as
one table where embedding and head are tied.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import int8_heads
from benchmarks.real_text import TEXT_FILES, progress, smollm2, text_tokens

TEXT_TOKENS = 2048
WINDOW_TOKENS = 256
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "float32": ("Float32", {}),
    "bfloat16": ("BFloat16", {}),
    "bfloat16, output held in float32": ("BFloat16", {"output": "Float32"}),
    "bfloat16, output computed in bfloat16": ("BFloat16", {"output": "BFloat16"}),
    "attention bfloat16": ("Float32", {"attention": "BFloat16"}),
    "attention float16": ("Float32", {"attention": "Float16"}),
    "feed-forward int8": ("Float32", {"feed_forward": "Int8"}),
    "feed-forward and attention int8": ("Float32", {"attention": "Int8", "feed_forward": "Int8"}),
    "all linears int8": ("Float32", {"attention": "Int8", "feed_forward": "Int8", "output": "Int8"}),
    "kv int8, chosen heads": ("Float32", {"kv_cache": "Int8Heads"}),
    "kv int8, all heads": ("Float32", {"kv_cache": "Int8"}),
    "attention bfloat16, feed-forward int8, kv int8 of chosen heads": (
        "Float32",
        {"attention": "BFloat16", "feed_forward": "Int8", "kv_cache": "Int8Heads"},
    ),
}
"""The engine's type, and what differs from it."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, help=f"tokens to score (default: {TEXT_TOKENS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads")
    parser.add_argument("--heads", type=Path, help="a calibration whose heads are taken instead of choosing some")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    found = measure(arguments.model or smollm2(), arguments.text_tokens, arguments.threads, arguments.heads)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, row in found["rows"].items():
        loss = f"{row['perplexity_loss_percent']:+8.3f} ± {row['perplexity_loss_error_percent']:.3f} %"
        print(f"{name:64} {row['perplexity']:9.3f}  {loss}  {row['weights_mib']:7.1f} MiB  {row['kv_bytes_per_token']:6} bytes/token")


def measure(model: Path, count: int = TEXT_TOKENS, threads: int | None = None, calibration: Path | None = None) -> dict[str, Any]:
    """All rows."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import torch

    from npufleet_api.model import Dtype
    from npufleet_api.settings import PrecisionSettings
    from npufleet_kernels.dispatch import select_kernels
    from npufleet_pod.calibration import load_calibration
    from npufleet_pod.models.checkpoint import open_checkpoint
    from npufleet_pod.models.collective import Alone
    from npufleet_pod.models.config import load_config
    from npufleet_pod.models.decoder import Decoder
    from npufleet_pod.models.perplexity import loss_percent, perplexity, token_losses, windows_of
    from npufleet_pod.models.precision import plan_precision
    from npufleet_pod.models.sharding import shard
    from npufleet_pod.models.weights import load_weights

    torch.set_num_threads(threads or os.cpu_count() or 1)
    config = load_config(model)
    with tempfile.TemporaryDirectory(prefix="precision-") as scratch:
        path = calibration or Path(scratch) / "calibration.yaml"
        if calibration is None:
            int8_heads.calibrate(model, path)
        heads = load_calibration(path).int8_kv_heads
    windows = windows_of(text_tokens(model, count), WINDOW_TOKENS)
    rows: dict[str, dict[str, Any]] = {}
    exact: torch.Tensor | None = None
    for name, (dtype, fields) in ROWS.items():
        progress(name)
        plan = plan_precision(PrecisionSettings.model_validate(fields), Dtype(dtype), config, heads)
        # The order of heads is that of the checkpoint, since heads are quantised on their way and not by a cache.
        unordered = plan_precision(PrecisionSettings.model_validate({**fields, "kv_cache": "Auto"}), Dtype(dtype), config)
        with open_checkpoint(model, torch.float32, torch.device("cpu")) as checkpoint:
            part = shard(config)
            weights = load_weights(config, checkpoint, lambda: True, part, unordered)
        decoder = Decoder(config, weights, select_kernels("cpu"), part, Alone(), unordered)
        losses = token_losses(decoder, windows, plan.int8_kv_heads)
        exact = losses if exact is None else exact
        rise, error = loss_percent(exact, losses)
        rows[name] = {
            "perplexity": perplexity(losses),
            "perplexity_loss_percent": rise,
            "perplexity_loss_error_percent": error,
            "weights_mib": _bytes(weights) / 2**20,
            "kv_bytes_per_token": plan.kv_bytes_per_token(config.kv_heads, config.head_size),
        }
    text = {"files": list(TEXT_FILES), "tokens": sum(len(window) for window in windows), "window_tokens": WINDOW_TOKENS}
    return {"model": model.name, "text": text, "rows": rows}


def _bytes(weights: object) -> int:
    """Bytes of all tensors in a tree of tuples and dataclasses, each counted once."""
    import torch

    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, tuple):
            for one in value:
                visit(one)
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                visit(getattr(value, field))

    visit(weights)
    return sum(seen.values())


if __name__ == "__main__":
    main()
