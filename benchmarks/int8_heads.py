"""KV memory that INT8 heads save and perplexity that they cost: `python -m benchmarks.int8_heads --json`; `benchmarks.memory` runs it too.

Heads are chosen as `npufleet-pod calibrate` does, on text that the model writes itself. What they cost is measured on other text, files of
this repository that the output names: the engine scores it as prompts, once with KV in float and once with the calibration, everything
else the same. `perplexity_loss_error_percent` is the standard error of the loss, by the differences of single tokens.
`memory_saved_percent` compares the bytes of a token's KV, scales included, with bfloat16, which is what NPUs serve in and the harder
comparison; `memory_saved_percent_by_dtype` adds float32, which this engine on a CPU computes in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_text import TEXT_FILES, progress, smollm2, text_tokens

TEXT_TOKENS = 4096
WINDOW_TOKENS = 512
OWN_WINDOWS, OWN_WINDOW_TOKENS = 4, 256
"""Text that the model writes for the calibration."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.int8_heads", description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    found = measure(arguments.model or smollm2(), arguments.text_tokens, arguments.threads, arguments.heads)
    if arguments.json:
        print(json.dumps({"int8_heads": found}))
        return
    print(summary(found))


def summary(found: dict[str, Any]) -> str:
    """One line for people."""
    loss, error = found["perplexity_loss_percent"], found["perplexity_loss_error_percent"]
    return (
        f"{found['heads']} of {found['all_heads']} KV heads in INT8 save {found['memory_saved_percent']:.1f} % of KV in bfloat16 "
        f"and cost {loss:.3f} ± {error:.3f} % of perplexity"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the measurement takes, for another command that runs it too."""
    parser.add_argument("--model", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, help=f"tokens to score (default: {TEXT_TOKENS})")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="compute threads")
    parser.add_argument("--heads", type=Path, help="a calibration whose heads are measured instead of choosing some")


def measure(model: Path, count: int = TEXT_TOKENS, threads: int | None = None, calibration: Path | None = None) -> dict[str, Any]:
    """Choose heads, and compare the engine with and without them."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import torch

    from npufleet_api.model import Dtype
    from npufleet_pod.calibration import load_calibration
    from npufleet_pod.models.config import load_config
    from npufleet_pod.models.perplexity import loss_percent, perplexity
    from npufleet_pod.models.precision import plan_precision, uniform_precision

    torch.set_num_threads(threads or os.cpu_count() or 1)
    config = load_config(model)
    with tempfile.TemporaryDirectory(prefix="int8-heads-") as scratch:
        path = calibration or Path(scratch) / "calibration.yaml"
        calibrating = {} if calibration else calibrate(model, path)
        heads = load_calibration(path).int8_kv_heads
        if heads is None:
            raise SystemExit(f"{path}: no heads in it: calibrate with heads")
        tokens = text_tokens(model, count)
        windows = [tokens[start : start + WINDOW_TOKENS] for start in range(0, len(tokens) - 1, WINDOW_TOKENS)]
        losses = []
        for kv_cache in ("Auto", "Int8Heads"):
            progress(f"scoring {len(tokens)} tokens with kvCache {kv_cache}")
            losses.append(torch.tensor(_engine_losses(model, windows, path, kv_cache, threads), dtype=torch.float64))
    rise, error = loss_percent(*losses)
    saved = {}
    for dtype in (Dtype.FLOAT32, Dtype.BFLOAT16):
        plain, quantised = (
            plan.kv_bytes_per_token(config.kv_heads, config.head_size)
            for plan in (uniform_precision(dtype, config), plan_precision(_settings("Int8Heads"), dtype, config, heads))
        )
        saved[dtype.value] = 100 * (1 - quantised / plain)
    return {
        "model": model.name,
        "heads": sum(len(layer) for layer in heads.layers),
        "all_heads": config.layers * config.kv_heads,
        "memory_saved_percent": saved[Dtype.BFLOAT16.value],
        "memory_saved_percent_by_dtype": saved,
        "perplexity_loss_percent": rise,
        "perplexity_loss_error_percent": error,
        "perplexity": {"float": perplexity(losses[0]), "int8_heads": perplexity(losses[1])},
        "text": {"files": list(TEXT_FILES), "tokens": len(tokens), "window_tokens": WINDOW_TOKENS},
        "calibration": calibrating,
    }


def _settings(kv_cache: str) -> Any:
    from npufleet_api.settings import PrecisionSettings

    return PrecisionSettings.model_validate({"kv_cache": kv_cache})


def calibrate(model: Path, path: Path) -> dict[str, Any]:
    """Choose heads on the model's own text and write them as a calibration; what was measured meanwhile."""
    import torch
    import yaml

    from npufleet_api.calibration import Calibration
    from npufleet_api.model import Dtype
    from npufleet_kernels.dispatch import select_kernels
    from npufleet_pod.calibration import calibrated_for
    from npufleet_pod.engine.resources import cpu_model
    from npufleet_pod.models.checkpoint import open_checkpoint
    from npufleet_pod.models.config import load_config
    from npufleet_pod.models.decoder import load_decoder
    from npufleet_pod.models.int8_heads import choose_int8_heads
    from npufleet_pod.models.own_text import sample_windows

    config = load_config(model)
    with open_checkpoint(model, torch.float32, torch.device("cpu")) as checkpoint:
        decoder = load_decoder(config, checkpoint, select_kernels("cpu"))
    progress("the model writes the calibration's text")
    windows = sample_windows(decoder, OWN_WINDOWS, OWN_WINDOW_TOKENS)
    progress("measuring heads")
    choice = choose_int8_heads(decoder, windows)
    made_for = calibrated_for(config, Dtype.FLOAT32, cpu_model(), 1)
    whole = Calibration(made_for=made_for, int8_kv_heads=choice.calibration())
    path.write_text(yaml.safe_dump(whole.model_dump(mode="json", by_alias=True, exclude_none=True)))
    return {
        "text": f"{OWN_WINDOWS} x {OWN_WINDOW_TOKENS} tokens of the model's own",
        "limit_percent": choice.limit_percent,
        "divergence_percent": choice.divergence_percent,
        "perplexity_loss_percent": choice.loss_percent,
        "perplexity_loss_error_percent": choice.loss_error_percent,
    }


def _engine_losses(model: Path, windows: Sequence[Sequence[int]], calibration: Path, kv_cache: str, threads: int | None) -> list[float]:
    """Negative log-probability of each token but the first of each window, as the engine tells its clients."""
    from npufleet_api.settings import EngineSettings
    from npufleet_pod.engine.engine import Engine
    from npufleet_pod.engine.loading import load_engine
    from npufleet_pod.engine.model_files import inspect_model
    from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams, TokenOutput

    settings = EngineSettings.model_validate(
        {
            "model_path": str(model),
            "served_name": "m",
            "device": "CPU",
            "dtype": "Float32",
            "max_model_length": WINDOW_TOKENS + 16,
            "max_num_sequences": 1,
            "prefix_cache": False,
            "calibration_path": str(calibration),
            "precision": {"kv_cache": kv_cache},
            "cpu_threads": threads,
        }
    )
    files = inspect_model(settings)
    stop, sampling = StopParams(max_tokens=1, ignore_eos=True), SamplingParams(temperature=0)

    async def run() -> list[float]:
        engine = Engine(lambda keep_going: load_engine(settings, files, keep_going), _Silent(), settings.seed)
        engine.start()
        losses: list[float] = []
        try:
            await engine.wait_ready()
            for number, window in enumerate(windows):
                request = GenerationRequest(str(number), tuple(window), stop, sampling, prompt_logprobs=0)
                with engine.submit([request]) as generation:
                    _, output = await generation.next()
                if not isinstance(output, TokenOutput) or output.prompt_logprobs is None:
                    raise SystemExit(f"the engine did not score window {number}: {output}")
                losses += [-entry.logprob for entry in output.prompt_logprobs if entry is not None]
        finally:
            await engine.stop()
        return losses

    losses = asyncio.run(run())
    if not all(math.isfinite(loss) for loss in losses):
        raise SystemExit("the engine's scores are no numbers: the weights are damaged")
    return losses


class _Silent:
    """An observer that forgets."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


if __name__ == "__main__":
    main()
