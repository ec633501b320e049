"""Linear projection with INT8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 4096
"""Rows of the weight that are widened at once: scratch memory is 4096 · in floats whatever the weight's size."""


def reference(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ (weight · scale).T + bias`, summed in float32.

    x: (T, in), any float dtype; it is not quantised. weight: (out, in) int8, scale: (out,) float32, as `int8.quantise` makes them.
    bias: (out,), any float dtype, or None. Returns (T, out) in x's dtype. With the weight w that was quantised, an output differs from
    `linear` of w by at most `scale / 2 · Σ|x|`, besides rounding.
    """
    wide = x.to(torch.float32)
    output = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    for start in range(0, weight.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        output[:, rows] = torch.nn.functional.linear(wide, weight[rows].to(torch.float32))
    output *= scale
    if bias is not None:
        output += bias
    return output.to(x.dtype)
