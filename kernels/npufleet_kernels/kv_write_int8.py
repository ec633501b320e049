"""Quantises new keys, or values, and stores them in the KV cache."""

from __future__ import annotations

from torch import Tensor

from npufleet_kernels import int8


def reference(rows: Tensor, scales: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write `int8.quantise(new)` in place: one scale per token and head, so that what is stored depends on nothing but the token.

    rows: (K, S, D) int8 and scales: (K, S) float32, of any strides. slots: (n,) int64, all different. new: (n, K, D), any float dtype.
    """
    values, steps = int8.quantise(new)
    rows.index_copy_(1, slots, values.transpose(0, 1))
    scales.index_copy_(1, slots, steps.transpose(0, 1))
