"""The KV cache as the model sees it while it computes one step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npufleet_kernels.head_groups import HeadGroup
from npufleet_pod.engine.memory.kv_cache import Place, ZeroCopyKVCache


class StepCache:
    """Where the tokens of a step's sequences lie, in batch order. A `models.decoder.BatchCache`."""

    def __init__(self, cache: ZeroCopyKVCache, places: Sequence[Place], slots: Tensor) -> None:
        """places: of all tokens of each sequence, the new ones included. slots: (T,) of the new ones, end to end."""
        self._cache = cache
        self._places = places
        self._slots = slots

    def append(self, layer: int, keys: Tensor, values: Tensor) -> list[HeadGroup]:
        """Store the step's new keys and values of one layer, each (T, K, D); return every sequence's."""
        self._cache.write(layer, self._slots, keys, values)
        return self._cache.groups(layer, self._places)
