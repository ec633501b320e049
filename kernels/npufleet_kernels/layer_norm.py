"""Layer normalisation, with the residual addition that precedes it in an encoder layer."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """Normalise `x + residual` to zero mean and unit variance (Ba et al. 2016, arXiv:1607.06450), then `· weight + bias`.

    x: (T, hidden), any float dtype; mean and variance are taken in float32. weight, bias: (hidden,). residual: (T, hidden) or None.
    Returns (T, hidden) in x's dtype.
    """
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon)
    return (centred * scale * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)
