"""Keys and values of all sequences in one region, written once and in place by the operation that makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store, Transfer
from npufleet_pod.engine.memory.pool import ALIGNMENT_BYTES, AscendMemoryPool, HostRegion, Range

Place = slice | Tensor
"""Where tokens of a sequence lie: slots that follow each other, or the slot of each."""

NO_PAGE = 0
"""Fills block tables behind a sequence's last page; kernels stop at its length and never read it."""


class PageOrder(Enum):
    """How a layer's keys, or values, lie in memory."""

    HEAD_MAJOR = auto()
    """(K, pages, page_tokens, D): one head's keys lie together over adjacent pages, as a CPU reads them."""
    PAGE_MAJOR = auto()
    """(pages, page_tokens, K, D): a page lies together, as the NPU's paged attention takes it."""


class ZeroCopyKVCache:
    """K and V of every layer. New tokens are written to their slots and nothing is moved when a sequence grows.

    On a CPU the region is host memory aligned to 128 bytes, on huge pages where there are any (`huge_pages` says which); elsewhere it is
    one tensor of the device. A sequence on adjacent pages is read through a view; only a scattered one is gathered, unless the kernel
    takes block tables. `static_buffers` (name to bytes) are laid out in the same region, for what each step fills anew. The host tier is
    attached later: pages end to end in memory that the caller has pinned where the device wants that. Used by one thread at a time.
    Raises OutOfMemoryError if the host has too little.
    """

    def __init__(
        self,
        layout: CacheLayout,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        order: PageOrder = PageOrder.HEAD_MAJOR,
        static_buffers: Mapping[str, int] | None = None,
    ) -> None:
        self.layout = layout
        self.order = order
        pages, tokens = layout.page_count, layout.page_tokens
        shape = (kv_heads, pages, tokens, head_size) if order is PageOrder.HEAD_MAJOR else (pages, tokens, kv_heads, head_size)
        self._page_axis = 1 if order is PageOrder.HEAD_MAJOR else 0
        self._page_shape = (2, layers, *(size for axis, size in enumerate(shape) if axis != self._page_axis))
        self._dtype = dtype
        self._memory: HostRegion | None = None
        whole = (2, layers, *shape)
        kv_bytes = math.prod(whole) * dtype.itemsize
        sizes = [kv_bytes, *(static_buffers or {}).values()]
        capacity = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        self.pool = AscendMemoryPool(capacity, static_buffers=static_buffers)
        self._bytes = self._take(capacity, device)
        self._region = self._tensor(self.pool.allocate(kv_bytes), whole, dtype)
        self._keys, self._values = self._region[0].unbind(), self._region[1].unbind()
        self._host: Tensor | None = None

    @property
    def page_bytes(self) -> int:
        """Size of one page: K and V of every layer."""
        return math.prod(self._page_shape) * self._dtype.itemsize

    @property
    def huge_pages(self) -> str:
        """Which huge pages hold the region: see HostRegion; "none" on a device."""
        return "none" if self._memory is None else self._memory.huge_pages

    def static(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A static buffer, or its beginning, as a tensor. Raises MemoryStateError if it is unknown or too small."""
        part = self.pool.static(name)
        if math.prod(shape) * dtype.itemsize > part.size:
            raise MemoryStateError(f"static buffer {name!r} has {part.size} bytes, {tuple(shape)} of {dtype} need more: lay it out larger")
        return self._tensor(part, shape, dtype)

    def attach_host(self, buffer: memoryview) -> None:
        """Let pages move to and from `buffer`, which holds whole pages end to end. Raises LayoutError if it holds none."""
        pages = len(buffer) // self.page_bytes
        if pages < 1:
            raise LayoutError(f"host tier: a buffer of {len(buffer)} bytes holds no page of {self.page_bytes}: make it larger")
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * self.page_bytes)
        self._host = flat.view(self._dtype).view(pages, *self._page_shape)

    def keys(self, layer: int) -> Tensor:
        """A layer's keys whole, for kernels that read and write by slots or block tables; shape as the order says."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """A layer's values whole."""
        return self._values[layer]

    def slots(self, table: HierarchicalBlockTable, start: int, count: int) -> Tensor:
        """Slots of tokens [start, start + count): (count,) int64, on the CPU. Raises IndexError beyond the table's pages."""
        # Each step asks for every sequence: NumPy answers in a hundredth of the time that torch takes to wake its threads.
        size = self.layout.page_tokens
        first = start // size
        pages = np.array(table.pages[first : self.layout.pages_for(start + count)], dtype=np.int64)
        slots = (pages[:, None] * size + np.arange(size)).ravel()[start - first * size :][:count]
        if len(slots) < count:
            raise IndexError(f"tokens {start} to {start + count - 1} lie beyond the table's {len(table.pages)} pages of {size}")
        return torch.from_numpy(slots)

    def place(self, table: HierarchicalBlockTable, length: int) -> Place:
        """Where the first `length` tokens lie: one range where their pages are adjacent, else every token's slot."""
        used = HierarchicalBlockTable(self.layout)
        used.pages = table.pages[: self.layout.pages_for(length)]
        if used.contiguous:
            start = used.slot(0) if length else 0
            return slice(start, start + length)
        return self.slots(table, 0, length)

    def block_tables(self, tables: Sequence[HierarchicalBlockTable]) -> Tensor:
        """Pages of each sequence, (B, most pages) int32 on the CPU, for kernels that follow them."""
        widest = max((len(table.pages) for table in tables), default=0)
        rows = [table.pages + [NO_PAGE] * (widest - len(table.pages)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32).view(len(tables), widest)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values, each (n, K, D), at `slots` (n,) in place."""
        for whole, new in ((self._keys[layer], keys), (self._values[layer], values)):
            if self.order is PageOrder.HEAD_MAJOR:
                whole.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1))
            else:
                whole.flatten(0, 1).index_copy_(0, slots, new)

    def view(self, layer: int, place: Place) -> tuple[Tensor, Tensor]:
        """The keys and values at `place`, each (K, n, D): a view of a range, a copy of scattered slots."""
        keys, values = (self._read(whole, place) for whole in (self._keys[layer], self._values[layer]))
        return keys, values

    def execute(self, transfers: Sequence[Transfer]) -> None:
        """Copy pages, in order. Raises MemoryStateError if one is to move to a host without memory."""
        for transfer in transfers:
            match transfer:
                case Copy(source, target, tokens):
                    # Tokens are the last axis but one of a head-major page, and the third of a page-major one.
                    axis = 3 if self.order is PageOrder.HEAD_MAJOR else 2
                    self._page(target).narrow(axis, 0, tokens).copy_(self._page(source).narrow(axis, 0, tokens))
                case Store(page, slot):
                    self._host_page(slot).copy_(self._page(page))
                case Load(slot, page):
                    self._page(page).copy_(self._host_page(slot))

    def _read(self, whole: Tensor, place: Place) -> Tensor:
        by_slot = whole.flatten(1, 2) if self.order is PageOrder.HEAD_MAJOR else whole.flatten(0, 1).transpose(0, 1)
        return by_slot[:, place] if isinstance(place, slice) else by_slot.index_select(1, place.to(whole.device))

    def _page(self, page: int) -> Tensor:
        return self._region.select(self._page_axis + 2, page)

    def _host_page(self, slot: int) -> Tensor:
        if self._host is None:
            raise MemoryStateError("a page is to move to the host, which has no memory for it: attach some")
        return self._host[slot]

    def _take(self, size_bytes: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._memory = HostRegion(size_bytes)
        return torch.frombuffer(self._memory.buffer, dtype=torch.uint8, count=size_bytes)

    def _tensor(self, part: Range, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[part.start : part.start + size_bytes].view(dtype).view(*shape)
