"""Linear projection."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    x: (T, in), any float dtype. weight: (out, in), same dtype. bias: (out,) or None. Returns (T, out) in x's dtype.
    """
    return torch.nn.functional.linear(x, weight, bias)
