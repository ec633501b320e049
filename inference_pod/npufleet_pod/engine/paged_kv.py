"""Keys and values of all sequences, in one region that is divided into pages."""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_pod.engine.paging import CacheLayout, PageTable


class PagedKVCache:
    """K and V of every layer, each (K, pages * page_tokens, D), so that a sequence on adjacent pages is one view."""

    def __init__(self, layout: CacheLayout, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._page_tokens = layout.page_tokens
        shape = (layers, kv_heads, layout.page_count * layout.page_tokens, head_size)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    def slots(self, table: PageTable, start: int, count: int) -> Tensor:
        """Where the tokens from `start` on lie: (count,) int64, on the CPU."""
        return _slots(table, self._page_tokens, start, count)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values, each (n, K, D), in place."""
        self._keys[layer].index_copy_(1, slots, keys.transpose(0, 1))
        self._values[layer].index_copy_(1, slots, values.transpose(0, 1))

    def view(self, layer: int, table: PageTable, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens' keys and values, each (K, length, D): a view where the pages are adjacent, else a copy."""
        pages = table.pages[: -(-length // self._page_tokens)]
        first = pages[0]
        if all(page == first + index for index, page in enumerate(pages)):
            start = first * self._page_tokens
            return self._keys[layer][:, start : start + length], self._values[layer][:, start : start + length]
        slots = _slots(table, self._page_tokens, 0, length).to(self._keys.device)
        return self._keys[layer].index_select(1, slots), self._values[layer].index_select(1, slots)


def _slots(table: PageTable, page_tokens: int, start: int, count: int) -> Tensor:
    tokens = torch.arange(start, start + count)
    return torch.tensor(table.pages, dtype=torch.int64)[tokens // page_tokens] * page_tokens + tokens % page_tokens
