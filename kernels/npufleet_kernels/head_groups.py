"""KV heads of a layer that are cached alike. INT8 heads are a group of their own, on an NPU a call of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Keys and values of adjacent heads, one (K, L, D) per sequence; scales, one (K, L) per sequence, where they are INT8."""

    kv_heads: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    key_scales: Sequence[Tensor] | None = None
    value_scales: Sequence[Tensor] | None = None
