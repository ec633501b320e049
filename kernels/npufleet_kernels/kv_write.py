"""Stores new keys, or values, in the KV cache."""

from __future__ import annotations

from torch import Tensor


def reference(rows: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write `new` in place: rows (K, S, D), of any strides; slots (n,) int64, all different; new (n, K, D) in rows' dtype."""
    rows.index_copy_(1, slots, new.transpose(0, 1))
