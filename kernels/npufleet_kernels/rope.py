"""Rotary position embedding, in the half-split layout of the Llama family."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head by its token's position (Su et al. 2021, arXiv:2104.09864); element i pairs with i + D/2.

    query: (T, H, D). key: (T, K, D). cos, sin: (T, D), whose two halves are equal, in query's dtype.
    Returns the rotated (query, key) in the same shapes and dtypes.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
