"""Linear projection in float32, whatever type its operands are held in."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 4096
"""Rows of the weight that are widened at once: scratch memory is 4096 · in floats whatever the weight's size."""


def reference(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` with products and sums in float32. x: (T, in), weight: (out, in), any float dtypes. Returns (T, out) float32."""
    wide = x.to(torch.float32)
    if weight.dtype is torch.float32:
        return torch.nn.functional.linear(wide, weight)
    output = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for start in range(0, weight.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        output[:, rows] = torch.nn.functional.linear(wide, weight[rows].to(torch.float32))
    return output
