"""Root-mean-square normalisation, with the residual addition that precedes it in a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise `x + residual` by its root mean square (Zhang & Sennrich 2019, arXiv:1910.07467).

    x: (T, hidden), any float dtype; the mean is taken in float32. weight: (hidden,). residual: (T, hidden) or None.
    Returns (normalised, x + residual), both (T, hidden) in x's dtype; the second is the next residual.
    """
    total = x if residual is None else x + residual
    wide = total.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype), total
