"""What the ranks of a tensor-parallel model exchange while they compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """The exchange between ranks, as one of them sees it. All ranks make the same calls in the same order, with tensors of one dtype."""

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's `tensor`, all of one shape, contiguous; may be written over it."""
        ...

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """On rank 0 every rank's `tensor` (N, sizes[rank]), contiguous, side by side: (N, sum of sizes). The others get their own back."""
        ...


class Alone:
    """The only rank."""

    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """The tensor itself."""
        return tensor
