"""Keys and values of all sequences, in one region that is divided into pages, and the host's copy of some."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store, Transfer

Place = slice | Tensor
"""Where tokens of a sequence lie: slots that follow each other, or the number of each."""


class PagedKVCache:
    """K and V of every layer, each (K, pages * page_tokens, D), so that a sequence on adjacent pages is one view."""

    def __init__(self, layout: CacheLayout, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._page_tokens = layout.page_tokens
        # One region: a page of it is moved between memories at once.
        self._region = torch.empty((2, layers, kv_heads, layout.page_count, layout.page_tokens, head_size), dtype=dtype, device=device)
        flat = self._region.view(2, layers, kv_heads, layout.page_count * layout.page_tokens, head_size)
        self._keys, self._values = flat[0].unbind(), flat[1].unbind()
        self._host: Tensor | None = None

    @property
    def page_bytes(self) -> int:
        """Size of one page, K and V of every layer."""
        return self._region[:, :, :, 0].numel() * self._region.element_size()

    def attach_host(self, buffer: memoryview) -> None:
        """Let pages move to and from `buffer`, which holds whole pages end to end."""
        pages = len(buffer) // self.page_bytes
        shape = self._region[:, :, :, 0].shape
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * self.page_bytes)
        self._host = flat.view(self._region.dtype).view(pages, *shape)

    def slots(self, table: HierarchicalBlockTable, start: int, count: int) -> Tensor:
        """Where the tokens from `start` on lie: (count,) int64, on the CPU."""
        tokens = torch.arange(start, start + count)
        pages = torch.tensor(table.pages, dtype=torch.int64)
        return pages[tokens // self._page_tokens] * self._page_tokens + tokens % self._page_tokens

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values, each (n, K, D), in place."""
        self._keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self._values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def place(self, table: HierarchicalBlockTable, length: int) -> Place:
        """Where the first `length` tokens lie: a range where their pages are adjacent, else every token's slot."""
        pages = table.pages[: -(-length // self._page_tokens)]
        start = pages[0] * self._page_tokens
        if all(after == before + 1 for before, after in pairwise(pages)):
            return slice(start, start + length)
        return self.slots(table, 0, length)

    def view(self, layer: int, place: Place) -> tuple[Tensor, Tensor]:
        """The keys and values at `place`, each (K, n, D): a view of a range, a copy of scattered slots."""
        keys, values = self._keys[layer], self._values[layer]
        if isinstance(place, slice):
            return keys[:, place], values[:, place]
        return keys.index_select(1, place), values.index_select(1, place)

    def execute(self, transfers: Sequence[Transfer]) -> None:
        """Copy pages, in order."""
        for transfer in transfers:
            match transfer:
                case Copy(source, target, tokens):
                    self._region[:, :, :, target, :tokens] = self._region[:, :, :, source, :tokens]
                case Store(page, slot):
                    self._slots_of_host()[slot] = self._region[:, :, :, page]
                case Load(slot, page):
                    self._region[:, :, :, page] = self._slots_of_host()[slot]

    def _slots_of_host(self) -> Tensor:
        if self._host is None:
            raise MemoryStateError("a page is to move to the host, which has no memory for it: attach some")
        return self._host
