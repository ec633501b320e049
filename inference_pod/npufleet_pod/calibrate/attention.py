"""Times the attention strategies on one layer of a model's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from npufleet_api.calibration import AttentionPoint
from npufleet_kernels.dispatch import Kernels
from npufleet_kernels.layer_step import Attention
from npufleet_pod.calibrate.turns import in_turns
from npufleet_pod.engine.device import Device
from npufleet_pod.engine.fusion import MAX_SCORE_BYTES, ORDER, score_bytes
from npufleet_pod.models.fusion_plan import AttentionStrategy

DECODING_SEQUENCES = 8
"""Sequences that get their next token in one call, so that what a call costs is shared as in a batch."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one layer, or of a rank's part of it."""

    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype


def measure_attention(
    kernels: Kernels,
    device: Device,
    shape: AttentionShape,
    lengths: Sequence[int],
    chunk_tokens: int,
    repeats: int,
    tell: Callable[[AttentionPoint], None] = lambda point: None,
) -> list[AttentionPoint]:
    """The median time of one sequence at each length, for a prompt's last `chunk_tokens` tokens and for a next token.

    Strategies take turns, so that whatever else the machine does hits all of them alike. One that would take more memory for scores than
    serving allows is left out.
    """
    strategies = {
        AttentionStrategy.FULL: kernels.attention_full,
        AttentionStrategy.TWO_PHASE: kernels.attention_two_phase,
        AttentionStrategy.BLOCKED: kernels.attention_blocked,
    }
    points = []
    for length in lengths:
        for new_tokens, sequences in ((min(length, chunk_tokens), 1), (1, DECODING_SEQUENCES)):
            fitting = {one: strategies[one] for one in ORDER if score_bytes(one, shape.heads, new_tokens, length) <= MAX_SCORE_BYTES}
            times = _times(fitting, device, shape, length, new_tokens, sequences, repeats)
            for strategy, seconds in times.items():
                milliseconds = round(1000 * median(seconds) / sequences, 6)
                point = AttentionPoint(strategy=strategy.value, tokens=length, new_tokens=new_tokens, milliseconds=milliseconds)
                points.append(point)
                tell(point)
    return points


def _times(
    strategies: dict[AttentionStrategy, Attention],
    device: Device,
    shape: AttentionShape,
    length: int,
    new_tokens: int,
    sequences: int,
    repeats: int,
) -> dict[AttentionStrategy, list[float]]:
    query = _random(device, shape, new_tokens * sequences, shape.heads)
    keys = [_random(device, shape, shape.kv_heads, length) for _ in range(sequences)]
    values = [_random(device, shape, shape.kv_heads, length) for _ in range(sequences)]
    counts, scale = [new_tokens] * sequences, shape.head_size**-0.5

    def timed(attention: Attention) -> float:
        device.synchronize()
        began = time.perf_counter()
        attention(query, keys, values, counts, scale)
        device.synchronize()
        return time.perf_counter() - began

    with torch.inference_mode():
        return in_turns({strategy: partial(timed, attention) for strategy, attention in strategies.items()}, repeats)


def _random(device: Device, shape: AttentionShape, *sizes: int) -> Tensor:
    """(*sizes, D)"""
    generator = torch.Generator().manual_seed(len(sizes))
    return torch.randn((*sizes, shape.head_size), generator=generator).to(device.torch_device, shape.dtype)
