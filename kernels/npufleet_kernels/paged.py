"""Where the keys and values of a step's sequences lie in the cache, for kernels that read and write it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """N sequences with T new tokens, which lie end to end.

    tensors: of each layer's groups of heads, one after the other: keys, values (K, S, D), their scales (K, S) float32, or None twice
    where they are float. groups: how many each layer has. new_slots: (T,) int64. lengths: tokens of each sequence, the new ones included.
    first_slots: where its tokens follow each other from; -1 where they are scattered: then their slots lie in `scattered`, int64, end to
    end.
    """

    tensors: Sequence[Tensor | None]
    groups: Sequence[int]
    new_slots: Tensor
    lengths: Sequence[int]
    first_slots: Sequence[int]
    scattered: Tensor
