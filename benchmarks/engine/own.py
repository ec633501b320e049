"""npufleet's engine as a server runs it: scheduler, pipeline, sampling and all, in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.points import BATCHES, NEW_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS, prompt

PRECISIONS: dict[str, dict[str, str]] = {
    "npufleet-bf16": {},
    "npufleet-int8": {"attention": "Int8", "feed_forward": "Int8", "output": "Int8"},
}


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def measure(name: str, model: Path, threads: int, repeats: int, began: float) -> dict[str, float]:
    """All points. began: time.time() at which this process was started."""
    from npufleet_api.settings import EngineSettings
    from npufleet_pod.engine.engine import Engine
    from npufleet_pod.engine.loading import load_engine
    from npufleet_pod.engine.model_files import inspect_model

    settings = EngineSettings.model_validate(
        {
            "model_path": str(model),
            "served_name": "m",
            "device": "CPU",
            "dtype": "BFloat16",
            "precision": PRECISIONS[name],
            "max_model_length": 2 * PREFILL_TOKENS,
            "max_num_sequences": max(BATCHES),
            "prefix_cache": False,
            "cpu_threads": threads,
        }
    )
    files = inspect_model(settings)

    async def run() -> dict[str, float]:
        engine = Engine(lambda keep_going: load_engine(settings, files, keep_going), _Silent(), settings.seed)
        engine.start()
        try:
            await engine.wait_ready()
            found = {"start_s": round(time.time() - began, 2)}
            await _seconds(engine, [prompt(0, 32)], 4)
            for batch in BATCHES:
                times = [
                    await _seconds(engine, [prompt(index, PROMPT_TOKENS, round_) for index in range(batch)], NEW_TOKENS)
                    for round_ in range(1 if batch > 8 else repeats)
                ]
                found[f"b{batch}_tok_s"] = round(batch * NEW_TOKENS / min(times), 1)
            times = [await _seconds(engine, [prompt(0, PREFILL_TOKENS, round_)], 1) for round_ in range(repeats + 1)]
            found["prefill_1024_tok_s"] = round(PREFILL_TOKENS / min(times), 1)
            return found
        finally:
            await engine.stop()

    return asyncio.run(run())


async def _seconds(engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    from npufleet_pod.engine.request import GenerationFailed, GenerationRequest, SamplingParams, StopParams

    stop = StopParams(max_tokens=new_tokens, ignore_eos=True)
    requests = [GenerationRequest(f"r{index}", tuple(ids), stop, SamplingParams(temperature=0)) for index, ids in enumerate(prompts)]
    began = time.perf_counter()
    with engine.submit(requests) as generation:
        while not generation.finished:
            _, output = await generation.next()
            if isinstance(output, GenerationFailed):
                raise SystemExit(f"the engine failed: {output}")
    return time.perf_counter() - began


def profile(model: Path, threads: int, name: str) -> dict[str, Any]:
    """Milliseconds of each fused part, all layers together and a layer on average, for next tokens and for a prompt."""
    import torch

    from npufleet_api.model import Dtype
    from npufleet_api.settings import PrecisionSettings
    from npufleet_pod.engine.device import CpuDevice
    from npufleet_pod.engine.memory.layout import CacheLayout
    from npufleet_pod.engine.rank_loading import load_part, take_cache
    from npufleet_pod.engine.step_cache import StepCache
    from npufleet_pod.models.config import load_config
    from npufleet_pod.models.decoder import ALONE
    from npufleet_pod.models.precision import plan_precision

    torch.set_num_threads(threads)
    config, device = load_config(model), CpuDevice()
    plan = plan_precision(PrecisionSettings.model_validate(PRECISIONS[name]), Dtype.BFLOAT16, config)
    decoder = load_part(config, model, plan, device, ALONE, lambda: True)
    assert decoder.stack is not None, "the model is not one that is computed by one call"
    found: dict[str, Any] = {"layers": config.layers}
    for batch, new in ((1, 1), (8, 1), (32, 1), (1, PREFILL_TOKENS)):
        length = new if new > 1 else PROMPT_TOKENS + NEW_TOKENS // 2
        cache = take_cache(decoder, CacheLayout(32, 32, -(-batch * length // 32)), device)
        places = [slice(index * length, (index + 1) * length) for index in range(batch)]
        slots = torch.cat([torch.arange(place.stop - new, place.stop) for place in places])
        positions = torch.arange(length - new, length).repeat(batch)
        hidden = torch.randn(batch * new, config.hidden_size).to(torch.bfloat16)
        step = StepCache(cache, places, slots).paged()
        rotation = decoder.rotation(positions)
        best: dict[str, float] = {}
        for _ in range(3 if new > 1 else 20):
            decoder.stack.forward(hidden, rotation, [new] * batch, step, profile=True)
            parts = decoder.stack.take_profile()
            if not best or sum(parts.values()) < sum(best.values()):
                best = parts
        kind = "prefill" if new > 1 else f"decode_b{batch}"
        found[kind] = {
            "parts_ms": {part: round(1000 * seconds, 3) for part, seconds in best.items()},
            "layer_ms": round(1000 * sum(best.values()) / config.layers, 4),
        }
    return found
