"""Keys and values of all sequences in one region, written once and in place by the operation that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from torch import Tensor

from npufleet_kernels import kv_write, kv_write_int8
from npufleet_kernels.dispatch import KvWriteInt8
from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.paged_rows import PagedRows
from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError
from npufleet_pod.engine.memory.kv_parts import PageOrder, PartKind, plan_parts
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store, Transfer
from npufleet_pod.engine.memory.pool import ALIGNMENT_BYTES, AscendMemoryPool, HostRegion, Range

WritePair = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""`kv_write_pair` of key rows, value rows, slots, keys and values."""

Place = slice | Tensor
"""Where tokens of a sequence lie: slots that follow each other, or the slot of each."""

NO_PAGE = 0
"""Fills block tables behind a sequence's last page; kernels stop at its length and never read it."""


@dataclass(slots=True)
class _Rows:
    """Keys, or values, of one group of a layer: all slots of all pages."""

    whole: Tensor
    scales: Tensor | None
    order: InitVar[PageOrder]
    rows: Tensor = field(init=False)
    """(K, S, D)"""
    whole_scales: Tensor | None = field(init=False)

    def __post_init__(self, order: PageOrder) -> None:
        self.rows = _by_slot(self.whole, order)
        self.whole_scales = self.scales
        self.scales = None if self.scales is None else _by_slot(self.scales, order)

    def read(self, place: Place) -> Tensor:
        return _at(self.rows, place)

    def read_scales(self, places: Sequence[Place]) -> list[Tensor] | None:
        return None if self.scales is None else [_at(self.scales, place) for place in places]


@dataclass(frozen=True, slots=True)
class _Group:
    """Heads of a layer that are stored alike."""

    keys: _Rows
    values: _Rows

    @property
    def kv_heads(self) -> int:
        return self.keys.rows.shape[0]


def _write_both(key_rows: Tensor, value_rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    kv_write.reference(key_rows, slots, keys)
    kv_write.reference(value_rows, slots, values)


class ZeroCopyKVCache:
    """K and V of every layer. New tokens are written to their slots and nothing is moved when a sequence grows.

    A layer's heads are one or two groups: the first of its heads are kept in `dtype`, the last `int8_heads[layer]` as INT8 with a float32
    scale per token and head; None: all in `dtype`. A page holds a token range of every layer and group, and moves whole.

    On a CPU the region is host memory aligned to 128 bytes, on huge pages where there are any (`huge_pages` says which); elsewhere it is
    one tensor of the device. A sequence on adjacent pages is read through a view; only a scattered one is gathered, unless the kernel
    takes block tables. `static_buffers` (name to bytes) are laid out in the same region, for what each step fills anew. The host tier is
    attached later: pages end to end in memory that the caller has pinned where the device wants that. `write_pair` and `write_int8` are
    the device's operations. Used by one thread at a time.
    Raises LayoutError if a layer has fewer heads than are to be INT8, OutOfMemoryError if the host has too little.
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
        int8_heads: Sequence[int] | None = None,
        write_pair: WritePair = _write_both,
        write_int8: KvWriteInt8 = kv_write_int8.reference,
    ) -> None:
        quantised = [0] * layers if int8_heads is None else list(int8_heads)
        if len(quantised) != layers or not all(0 <= count <= kv_heads for count in quantised):
            raise LayoutError(f"int8_heads: {quantised} is not a number of heads up to {kv_heads} for each of {layers} layers: correct it")
        self.layout = layout
        self.order = order
        self._memory: HostRegion | None = None
        parts = plan_parts(layout, [kv_heads - count for count in quantised], quantised, head_size, dtype, order)
        sizes = [*(part.size_bytes for part in parts), *(static_buffers or {}).values()]
        capacity = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        self.pool = AscendMemoryPool(capacity, static_buffers=static_buffers)
        self._bytes = self._take(capacity, device)
        self._parts = [(part, self._tensor(self.pool.allocate(part.size_bytes), part.shape, part.dtype)) for part in parts]
        self._write_pair, self._write_int8 = write_pair, write_int8
        self._layers = [self._groups_of(layer) for layer in range(layers)]
        self._host: list[Tensor] | None = None
        self.stored = self._stored()
        """Tensors of all layers' groups and how many groups each layer has, as `paged.PagedStep` wants them."""

    @property
    def page_bytes(self) -> int:
        """Size of one page: K and V of every layer, with their scales."""
        return sum(part.page_bytes for part, _ in self._parts)

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

    def attach_host(self, buffer: memoryview, slot_bytes: int | None = None, offset: int = 0) -> None:
        """Let pages move to and from `buffer`, which holds whole pages end to end.

        slot_bytes: from one page to the next, where each is part of a slot that several caches share; offset: of the part in its slot.
        Raises LayoutError if the buffer holds no slot.
        """
        stride = slot_bytes or self.page_bytes
        slots = len(buffer) // stride
        if slots < 1 or offset + self.page_bytes > stride:
            raise LayoutError(f"host tier: a buffer of {len(buffer)} bytes holds no page of {self.page_bytes}: make it larger")
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=slots * stride).view(slots, stride)
        self._host, start = [], offset
        for part, _ in self._parts:
            own = whole[:, start : start + part.page_bytes].view(part.dtype)
            self._host.append(own.view(slots, *part.page_shape))
            start += part.page_bytes

    def keys(self, layer: int, group: int = 0) -> Tensor:
        """The keys of one group of a layer whole, for kernels that read and write by slots or block tables; shape as the order says."""
        return self._layers[layer][group].keys.whole

    def values(self, layer: int, group: int = 0) -> Tensor:
        """The values of one group of a layer whole."""
        return self._layers[layer][group].values.whole

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
        """Store new keys and values, each (n, K, D), at `slots` (n,) in place, those of INT8 heads quantised."""
        first = 0
        for group in self._layers[layer]:
            heads = slice(first, first + group.kv_heads)
            first = heads.stop
            if group.keys.scales is None or group.values.scales is None:
                self._write_pair(group.keys.rows, group.values.rows, slots, keys[:, heads], values[:, heads])
            else:
                self._write_int8(group.keys.rows, group.keys.scales, slots, keys[:, heads])
                self._write_int8(group.values.rows, group.values.scales, slots, values[:, heads])

    def groups(self, layer: int, places: Sequence[Place]) -> list[HeadGroup]:
        """What lies at each sequence's place, by groups of heads: views of ranges, copies of scattered slots."""
        found = []
        for group in self._layers[layer]:
            keys, values = [group.keys.read(place) for place in places], [group.values.read(place) for place in places]
            found.append(HeadGroup(group.kv_heads, keys, values, group.keys.read_scales(places), group.values.read_scales(places)))
        return found

    def paged_groups(self, layer: int, table: Tensor, lengths: tuple[int, ...]) -> list[HeadGroup]:
        """The same of sequences by their pages, where a page lies together. table: as of `block_tables`, on the device."""

        def paged(whole: Tensor | None) -> PagedRows | None:
            return None if whole is None else PagedRows(whole, table, lengths)

        return [
            HeadGroup(
                group.kv_heads,
                PagedRows(group.keys.whole, table, lengths),
                PagedRows(group.values.whole, table, lengths),
                paged(group.keys.whole_scales),
                paged(group.values.whole_scales),
            )
            for group in self._layers[layer]
        ]

    def view(self, layer: int, place: Place, group: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of one group at `place`, each (K, n, D), as they are stored: a view of a range, a copy of scattered slots."""
        return self._layers[layer][group].keys.read(place), self._layers[layer][group].values.read(place)

    def execute(self, transfers: Sequence[Transfer]) -> None:
        """Copy pages, in order. Raises MemoryStateError if one is to move to a host without memory."""
        for transfer in transfers:
            match transfer:
                case Copy(source, target, tokens):
                    # Tokens are the last axis but one of a head-major page, and the third of a page-major one; scales lack the last axis.
                    axis = 3 if self.order is PageOrder.HEAD_MAJOR else 2
                    for part, whole in self._parts:
                        part.page(whole, target).narrow(axis, 0, tokens).copy_(part.page(whole, source).narrow(axis, 0, tokens))
                case Store(page, slot):
                    for (part, whole), host in zip(self._parts, self._host_parts(), strict=True):
                        host[slot].copy_(part.page(whole, page))
                case Load(slot, page):
                    for (part, whole), host in zip(self._parts, self._host_parts(), strict=True):
                        part.page(whole, page).copy_(host[slot])

    def _groups_of(self, layer: int) -> list[_Group]:
        own = {part.kind: whole[:, part.layers.index(layer)] for part, whole in self._parts if layer in part.layers}
        groups = []
        if PartKind.FLOAT in own:
            groups.append(_Group(*(_Rows(side, None, self.order) for side in own[PartKind.FLOAT])))
        if PartKind.INT8 in own:
            sides = zip(own[PartKind.INT8], own[PartKind.SCALE], strict=True)
            groups.append(_Group(*(_Rows(side, scales, self.order) for side, scales in sides)))
        return groups

    def _stored(self) -> tuple[list[Tensor | None], list[int]]:
        tensors: list[Tensor | None] = []
        for group in (group for layer in self._layers for group in layer):
            tensors += [group.keys.rows, group.values.rows, group.keys.scales, group.values.scales]
        return tensors, [len(layer) for layer in self._layers]

    def _host_parts(self) -> list[Tensor]:
        if self._host is None:
            raise MemoryStateError("a page is to move to the host, which has no memory for it: attach some")
        return self._host

    def _take(self, size_bytes: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._memory = HostRegion(size_bytes)
        return torch.frombuffer(self._memory.buffer, dtype=torch.uint8, count=size_bytes)

    def _tensor(self, part: Range, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[part.start : part.start + size_bytes].view(dtype).view(*shape)


def _by_slot(whole: Tensor, order: PageOrder) -> Tensor:
    """(K, S, …): of (K, pages, page_tokens, …), or of (pages, page_tokens, K, …)."""
    return whole.flatten(1, 2) if order is PageOrder.HEAD_MAJOR else whole.flatten(0, 1).transpose(0, 1)


def _at(rows: Tensor, place: Place) -> Tensor:
    return rows[:, place] if isinstance(place, slice) else rows.index_select(1, place.to(rows.device))
