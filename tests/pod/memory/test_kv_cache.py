"""The tensors: what is written is read, moved pages keep their content, and a sequence on adjacent pages is not copied."""

from __future__ import annotations

import pytest
import torch

from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError, OutOfMemoryError
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.kv_parts import PageOrder
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store
from npufleet_pod.engine.memory.pool import ALIGNMENT_BYTES
from npufleet_pod.engine.memory.shared import SharedRegion, create_shared
from npufleet_pod.engine.memory.sizing import KVBudget, kv_page_count

LAYOUT = CacheLayout(16, 16, 6)
LAYERS, HEADS, SIZE = 2, 3, 8
CPU = torch.device("cpu")


def new_cache(order: PageOrder, dtype: torch.dtype = torch.float32) -> ZeroCopyKVCache:
    return ZeroCopyKVCache(LAYOUT, LAYERS, HEADS, SIZE, dtype, CPU, order)


def table_of(*pages: int) -> HierarchicalBlockTable:
    table = HierarchicalBlockTable(LAYOUT)
    table.pages = list(pages)
    return table


def fill(cache: ZeroCopyKVCache, table: HierarchicalBlockTable, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write random keys and values of `length` tokens in two parts; what was written, by layer, each (K, length, D)."""
    written = []
    for layer in range(LAYERS):
        keys, values = torch.randn(2, length, HEADS, SIZE)
        for start, end in ((0, length // 2), (length // 2, length)):
            cache.write(layer, cache.slots(table, start, end - start), keys[start:end], values[start:end])
        written.append((keys.transpose(0, 1), values.transpose(0, 1)))
    return written


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize(("pages", "is_view"), [((2, 3, 4), True), ((4, 0, 3), False)])
def test_what_is_written_is_read_without_a_copy_where_pages_are_adjacent(order: PageOrder, pages: tuple[int, ...], is_view: bool) -> None:
    cache = new_cache(order)
    table = table_of(*pages)
    written = fill(cache, table, 37)
    place = cache.place(table, 37)
    for layer in range(LAYERS):
        for read, expected, whole in zip(cache.view(layer, place), written[layer], (cache.keys(layer), cache.values(layer)), strict=True):
            assert torch.equal(read, expected)
            assert (read.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()) == is_view


@pytest.mark.parametrize("order", PageOrder)
def test_pages_move_over_the_host_and_are_copied_in_part(order: PageOrder) -> None:
    cache = new_cache(order, torch.bfloat16)
    host = bytearray(2 * cache.page_bytes)
    cache.attach_host(memoryview(host))
    cache.write(0, torch.arange(96), torch.zeros(96, HEADS, SIZE, dtype=torch.bfloat16), torch.zeros(96, HEADS, SIZE, dtype=torch.bfloat16))
    keys = torch.randn(16, HEADS, SIZE).to(torch.bfloat16)
    cache.write(0, cache.slots(table_of(5), 0, 16), keys, keys)
    cache.execute([Store(5, 1), Copy(0, 5, 16), Load(1, 2), Copy(2, 3, 7)])
    moved, _ = cache.view(0, cache.place(table_of(2), 16))
    part, _ = cache.view(0, cache.place(table_of(3), 16))
    assert torch.equal(moved, keys.transpose(0, 1))
    assert torch.equal(part[:, :7], keys.transpose(0, 1)[:, :7])
    assert not part[:, 7:].any()


def test_block_tables_are_filled_to_the_longest() -> None:
    tables = new_cache(PageOrder.PAGE_MAJOR).block_tables([table_of(4, 1), table_of(), table_of(2)])
    assert tables.tolist() == [[4, 1], [0, 0], [2, 0]]
    assert tables.dtype == torch.int32


def test_pages_have_the_shape_that_paged_kernels_take() -> None:
    assert new_cache(PageOrder.PAGE_MAJOR).keys(0).shape == (6, 16, HEADS, SIZE)
    assert new_cache(PageOrder.HEAD_MAJOR).values(1).shape == (HEADS, 6, 16, SIZE)
    assert new_cache(PageOrder.HEAD_MAJOR).page_bytes == 2 * LAYERS * HEADS * 16 * SIZE * 4


def test_static_buffers_share_the_region_and_overlap_nothing() -> None:
    cache = ZeroCopyKVCache(LAYOUT, LAYERS, HEADS, SIZE, torch.float32, CPU, static_buffers={"slots": 100, "positions": 4096})
    slots = cache.static("slots", (12,), torch.int64)
    positions = cache.static("positions", (8, 16), torch.int32)
    written = fill(cache, table_of(0, 1, 2, 3, 4, 5), 96)
    slots.fill_(7)
    positions.fill_(-1)
    assert torch.equal(cache.view(1, cache.place(table_of(0, 1, 2, 3, 4, 5), 96))[0], written[1][0])
    assert slots.data_ptr() % ALIGNMENT_BYTES == positions.data_ptr() % ALIGNMENT_BYTES == cache.keys(0).data_ptr() % ALIGNMENT_BYTES == 0
    with pytest.raises(MemoryStateError, match="'slots' has 128 bytes"):
        cache.static("slots", (17,), torch.int64)


@pytest.mark.parametrize("order", PageOrder)
def test_caches_of_several_ranks_keep_their_parts_of_a_slot_apart(order: PageOrder) -> None:
    heads = (2, 1, 3)
    caches = [ZeroCopyKVCache(LAYOUT, LAYERS, count, SIZE, torch.float32, CPU, order, int8_heads=[0, 1]) for count in heads]
    sizes = [cache.page_bytes for cache in caches]
    with SharedRegion(create_shared("test"), 4 * sum(sizes)) as host:
        written = []
        for rank, cache in enumerate(caches):
            cache.attach_host(host.buffer, sum(sizes), sum(sizes[:rank]))
            keys = torch.full((16, heads[rank], SIZE), float(rank + 1))
            for layer in range(LAYERS):
                cache.write(layer, torch.arange(16), keys, -keys)
            written.append([[part.clone() for part in cache.view(layer, slice(0, 16))] for layer in range(LAYERS)])
            cache.execute([Store(0, 2)])
        for cache, expected in zip(caches, written, strict=True):
            cache.execute([Load(2, 5)])
            for layer in range(LAYERS):
                found = cache.view(layer, slice(80, 96))
                assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected[layer], strict=True))
        with pytest.raises(LayoutError, match="holds no page"):
            caches[2].attach_host(host.buffer, sum(sizes), sum(sizes[:2]) + 4)
        del cache, caches


def test_a_host_that_is_missing_or_too_small_is_told() -> None:
    cache = new_cache(PageOrder.HEAD_MAJOR)
    with pytest.raises(MemoryStateError, match="attach some"):
        cache.execute([Store(0, 0)])
    with pytest.raises(LayoutError, match="a buffer of 10 bytes"):
        cache.attach_host(memoryview(bytearray(10)))


@pytest.mark.parametrize(("free", "useful", "pages"), [(1000, 100, 7), (1000, 5, 5), (312, 100, 1)])
def test_pages_follow_from_what_is_free_and_useful(free: int, useful: int, pages: int) -> None:
    assert kv_page_count(KVBudget(free, 200, 0.9), 100, useful_pages=useful) == pages


def test_too_little_memory_is_told_with_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"1\.0 MiB are free, a step takes 2\.0 MiB of them and 4 pages 0\.5 MiB"):
        kv_page_count(KVBudget(2**20, 2**21, 0.9), 2**17, useful_pages=10, min_pages=4)
