"""The KV cache as the model sees it while it computes one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.paged import PagedStep
from npufleet_pod.engine.memory.kv_cache import Place, ZeroCopyKVCache


class StepCache:
    """Where the tokens of a step's sequences lie, in batch order. A `models.decoder.BatchCache`."""

    def __init__(self, cache: ZeroCopyKVCache, places: Sequence[Place], slots: Tensor) -> None:
        """places: of all tokens of each sequence, the new ones included. slots: (T,) of the new ones, end to end."""
        self._cache = cache
        self._places = places
        self._slots = slots
        scattered = [place for place in places if not isinstance(place, slice)]
        self._scattered = torch.cat(scattered) if scattered else slots[:0]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[HeadGroup]:
        """Store the step's new keys and values of one layer, each (T, K, D); return every sequence's."""
        self._cache.write(layer, self._slots, keys, values)
        return self._cache.groups(layer, self._places)

    def paged(self) -> PagedStep:
        """Where everything lies, for kernels that read and write the cache themselves."""
        tensors, groups = self._cache.stored
        return PagedStep(
            tensors=tensors,
            groups=groups,
            new_slots=self._slots,
            lengths=[place.stop - place.start if isinstance(place, slice) else len(place) for place in self._places],
            first_slots=[place.start if isinstance(place, slice) else -1 for place in self._places],
            scattered=self._scattered,
        )


class PagedStepCache:
    """The same by block tables, for a cache whose pages lie together."""

    def __init__(self, cache: ZeroCopyKVCache, table: Tensor, lengths: Sequence[int], slots: Tensor) -> None:
        """table: (B, most pages) int32. lengths: of each sequence, the new tokens included. slots: (T,) of the new ones, end to end."""
        self._cache = cache
        self._table = table
        self._lengths = tuple(lengths)
        self._slots = slots

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[HeadGroup]:
        """See `StepCache`."""
        self._cache.write(layer, self._slots, keys, values)
        return self._cache.paged_groups(layer, self._table, self._lengths)
