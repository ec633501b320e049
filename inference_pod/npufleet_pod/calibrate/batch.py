"""Times steps that give each sequence of a batch its next token, over sizes of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from npufleet_api.calibration import BatchPoint
from npufleet_pod.calibrate.turns import in_turns
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.step_cache import StepCache
from npufleet_pod.models.decoder import Decoder

ALWAYS = 128
"""Sizes up to it are always measured, as far as memory allows."""
PLATEAU = 1.02
"""A larger batch is of use if it gives so much more throughput than the best before it; after two that are not, none larger is tried."""


def measure_batches(
    decoder: Decoder,
    cache: ZeroCopyKVCache,
    device: Device,
    fusion: DynamicFusionManager,
    sizes: Sequence[int],
    context_tokens: int,
    repeats: int,
    tell: Callable[[BatchPoint], None] = lambda point: None,
) -> list[BatchPoint]:
    """The median throughput of each size, where every sequence has `context_tokens` tokens, of which the last is computed.

    sizes: ascending; `cache` holds the largest. What the cache holds does not matter for time. Sizes take turns.
    """
    work = {size: partial(_step_seconds, decoder, cache, device, fusion, size, context_tokens) for size in sizes}
    useful: list[int] = []
    best, useless = 0.0, 0
    for size in sizes:
        useful.append(size)
        work[size]()
        speed = size / work[size]()
        useless = 0 if speed > best * PLATEAU else useless + 1
        best = max(best, speed)
        if size >= ALWAYS and useless >= 2:
            break
    seconds = in_turns({size: work[size] for size in useful}, repeats)
    points = [BatchPoint(sequences=size, tokens_per_second=round(size / median(times), 3)) for size, times in seconds.items()]
    for point in points:
        tell(point)
    return points


def _step_seconds(
    decoder: Decoder, cache: ZeroCopyKVCache, device: Device, fusion: DynamicFusionManager, sequences: int, context_tokens: int
) -> float:
    stride = cache.layout.pages_for(context_tokens) * cache.layout.page_tokens
    starts = [index * stride for index in range(sequences)]
    place = device.torch_device
    slots = torch.tensor([start + context_tokens - 1 for start in starts], device=place)
    step = StepCache(cache, [slice(start, start + context_tokens) for start in starts], slots)
    ids = torch.zeros(sequences, dtype=torch.int64, device=place)
    positions = torch.full((sequences,), context_tokens - 1, dtype=torch.int64, device=place)
    lengths = torch.full_like(positions, context_tokens)
    counts = [1] * sequences
    _, plan = fusion.order(counts, [context_tokens] * sequences)
    with torch.inference_mode():
        device.synchronize()
        began = time.perf_counter()
        hidden = decoder.forward(ids, positions, counts, step, lengths, plan)
        decoder.logits(hidden).argmax(-1)
        device.synchronize()
        return time.perf_counter() - began
