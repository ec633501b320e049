"""Rotary position embedding, in the half-split layout of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head by its token's position (Su et al. 2021, arXiv:2104.09864); element i pairs with i + R/2.

    query: (T, H, D). key: (T, K, D). cos, sin: (T, R), R ≤ D, whose two halves are equal, in query's dtype; elements from R on stay
    as they are. Returns the rotated (query, key) in the same shapes and dtypes.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated
