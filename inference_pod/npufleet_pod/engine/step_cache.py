"""The paged KV cache as the model sees it while it computes one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from npufleet_pod.engine.paged_kv import PagedKVCache, Place


@dataclass(frozen=True, slots=True)
class SequencePages:
    """One sequence of a step: where its tokens lie, and which of them are new. A `models.decoder.SequenceCache`."""

    cache: PagedKVCache
    place: Place
    """Of all its tokens, the new ones included."""
    slots: Tensor
    """(n,) where each new token goes."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values, each (n, K, D), in place; return all of the layer's, each (K, L, D)."""
        self.cache.write(layer, self.slots, keys, values)
        return self.cache.view(layer, self.place)


class StepCache(Sequence[SequencePages]):
    """The sequences of a step in batch order, and all of them at once."""

    def __init__(self, cache: PagedKVCache, places: Sequence[Place], counts: Sequence[int], slots: Tensor) -> None:
        """counts: new tokens of each sequence. slots: (T,) where they go, end to end."""
        self.slots = slots
        self._cache = cache
        self._places = places
        self._counts = list(counts)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> SequencePages: ...

    @overload
    def __getitem__(self, index: slice) -> list[SequencePages]: ...

    def __getitem__(self, index: int | slice) -> SequencePages | list[SequencePages]:
        return list(self)[index]

    def __iter__(self) -> Iterator[SequencePages]:
        for place, slots in zip(self._places, torch.split(self.slots, self._counts), strict=True):
            yield SequencePages(self._cache, place, slots)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Store the whole step's new keys and values of one layer, each (T, K, D); return every sequence's, each (K, L, D)."""
        self._cache.write(layer, self.slots, keys, values)
        views = [self._cache.view(layer, place) for place in self._places]
        return [keys for keys, _ in views], [values for _, values in views]
