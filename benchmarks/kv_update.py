"""Time of a KV update: npufleet's cache, which writes new keys and values in place, beside transformers' DynamicCache, which joins anew.

An update is what one decode step does to all layers: store the new token of each sequence, and give every sequence's keys and values to
attention. Both do it at the same shapes, in turns; the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.step_cache import StepCache

BLOCK_TOKENS = 16
"""The chat profile's."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Keys and values of a model. Fewer layers than the model has, where all would not fit: each layer costs the same."""

    layers: int
    kv_heads: int
    head_size: int


LAYOUTS = {"smollm2": HeadLayout(30, 3, 64), "72b": HeadLayout(8, 8, 128)}
SHAPES = ((1, 128), (1, 1024), (1, 4096), (8, 128), (8, 1024), (32, 256))
"""(sequences, tokens of each)"""
QUICK_SHAPES = ((1, 64), (4, 128))


def measure_kv_update(shapes: tuple[tuple[int, int], ...] = SHAPES, repeats: int = 5) -> dict[str, Any]:
    """Percent of DynamicCache's time that is saved, over the sum of all shapes' times, and by shape."""
    points = []
    for name, heads in LAYOUTS.items():
        for sequences, tokens in shapes:
            own, peer = _measure(heads, sequences, tokens, repeats)
            milliseconds = {"npufleet": round(1000 * own, 4), "dynamic_cache": round(1000 * peer, 4)}
            saved = round(100 * (1 - own / peer), 2)
            points.append({"model": name, "sequences": sequences, "tokens": tokens, "milliseconds": milliseconds, "saved_percent": saved})
    own, peer = (sum(point["milliseconds"][who] for point in points) for who in ("npufleet", "dynamic_cache"))
    return {"kv_update_saved_percent": round(100 * (1 - own / peer), 2), "kv_update_by_shape": points}


def _measure(heads: HeadLayout, sequences: int, tokens: int, repeats: int) -> tuple[float, float]:
    """Median seconds of npufleet's update and of DynamicCache's, of the token after `tokens`."""
    new = torch.randn(2, sequences, heads.kv_heads, heads.head_size)
    work = {"own": _own(heads, sequences, tokens, new), "peer": _peer(heads, sequences, tokens, new)}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    with torch.inference_mode():
        for turn in range(repeats + 1):
            for name, update in work.items():
                began = time.perf_counter()
                update()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    return median(seconds["own"]), median(seconds["peer"])


def _own(heads: HeadLayout, sequences: int, tokens: int, new: torch.Tensor) -> Callable[[], None]:
    pages = -(-(tokens + 1) // BLOCK_TOKENS)
    layout = CacheLayout(BLOCK_TOKENS, BLOCK_TOKENS, sequences * pages)
    cache = ZeroCopyKVCache(layout, heads.layers, heads.kv_heads, heads.head_size, torch.float32, torch.device("cpu"))
    for layer in range(heads.layers):
        # As after a prompt: the memory is there.
        cache.keys(layer).fill_(1)
        cache.values(layer).fill_(1)
    starts = [index * pages * BLOCK_TOKENS for index in range(sequences)]
    step = StepCache(cache, [slice(start, start + tokens + 1) for start in starts], torch.tensor([start + tokens for start in starts]))

    def update() -> None:
        for layer in range(heads.layers):
            step.append(layer, new[0], new[1])

    return update


def _peer(heads: HeadLayout, sequences: int, tokens: int, new: torch.Tensor) -> Callable[[], None]:
    from transformers import DynamicCache

    cache = DynamicCache()
    before = torch.ones(2, sequences, heads.kv_heads, tokens, heads.head_size)
    for layer in range(heads.layers):
        cache.update(before[0], before[1], layer)
    held = [(layer.keys, layer.values) for layer in cache.layers]
    keys, values = new[0].unsqueeze(2), new[1].unsqueeze(2)

    def update() -> None:
        for index, layer in enumerate(cache.layers):
            # The next step's shapes are those of this one.
            layer.keys, layer.values = held[index]
            cache.update(keys, values, index)

    return update
