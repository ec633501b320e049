"""Symmetric INT8: what weights and KV are stored as."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
"""Largest magnitude of a stored value; -128 is not used, so that a number and its negative are stored alike."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scales) with `x ≈ values · scales`: one scale for each row of the last dimension.

    x: (..., n), any float dtype. Returns values (..., n) int8 and scales (...) float32. A row's scale is its largest magnitude / 127; a
    value is x / scale, rounded to the nearest integer, halves to the even one. So |x − value · scale| ≤ scale / 2 but for float32's own
    rounding. A row of zeros has scale 0. A row with an infinite or undefined element has a scale that is not finite: it stays undefined.
    """
    wide = x.to(torch.float32)
    scales = wide.abs().amax(-1) / LARGEST
    # Below float32's normal range a scale has few bits, and the quotient can pass the largest value.
    steps = wide / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """`values · scales` in float32: values (..., n) int8, scales (...)."""
    return values.to(torch.float32) * scales.unsqueeze(-1)
