"""INT8 heads beside float ones: what is written is read, quantised once, wherever its pages lie and however they move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_kernels import int8
from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import LayoutError
from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
from npufleet_pod.engine.memory.kv_parts import PageOrder
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store

LAYOUT = CacheLayout(16, 16, 6)
HEADS, SIZE = 3, 8
CPU = torch.device("cpu")
MIXED = [1, 0, 3, 2, 1]
"""INT8 heads of five layers."""


def new_cache(order: PageOrder, int8_heads: list[int], dtype: torch.dtype = torch.float32) -> ZeroCopyKVCache:
    return ZeroCopyKVCache(LAYOUT, len(int8_heads), HEADS, SIZE, dtype, CPU, order, int8_heads=int8_heads)


def table_of(*pages: int) -> HierarchicalBlockTable:
    table = HierarchicalBlockTable(LAYOUT)
    table.pages = list(pages)
    return table


def random(length: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((length, HEADS, SIZE), generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(part: torch.Tensor, int8_heads: int) -> torch.Tensor:
    """What a cache gives back for (n, K, D): (K, n, D) float32."""
    kept = HEADS - int8_heads
    rounded = int8.dequantise(*int8.quantise(part[:, kept:]))
    return torch.cat((part[:, :kept].float(), rounded), dim=1).transpose(0, 1)


def read(cache: ZeroCopyKVCache, layer: int, table: HierarchicalBlockTable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all groups, each (K, length, D) float32."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for group in cache.groups(layer, [cache.place(table, length)]):
        for side, rows, scales in zip(sides, (group.keys, group.values), (group.key_scales, group.value_scales), strict=True):
            assert rows[0].shape == (group.kv_heads, length, SIZE)
            side.append(rows[0].float() if scales is None else int8.dequantise(rows[0], scales[0]))
    return torch.cat(sides[0]), torch.cat(sides[1])


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pages", [(2, 3, 4), (4, 0, 3)])
def test_every_layer_gives_back_what_its_heads_keep(order: PageOrder, dtype: torch.dtype, pages: tuple[int, ...]) -> None:
    cache, table = new_cache(order, MIXED, dtype), table_of(*pages)
    for layer in range(len(MIXED)):
        keys, values = random(37, layer, dtype), random(37, 100 + layer, dtype)
        for start, end in ((0, 18), (18, 37)):
            cache.write(layer, cache.slots(table, start, end - start), keys[start:end], values[start:end])
    for layer, count in enumerate(MIXED):
        assert [group.kv_heads for group in cache.groups(layer, [])] == [heads for heads in (HEADS - count, count) if heads]
        keys, values = read(cache, layer, table, 37)
        assert torch.equal(keys, stored(random(37, layer, dtype), count))
        assert torch.equal(values, stored(random(37, 100 + layer, dtype), count))


@pytest.mark.parametrize("order", PageOrder)
def test_adjacent_pages_are_read_in_place(order: PageOrder) -> None:
    cache = new_cache(order, [1])
    for group, whole in zip(cache.groups(0, [cache.place(table_of(1, 2), 20)]), (cache.keys(0, 0), cache.keys(0, 1)), strict=True):
        assert group.keys[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    int8_group = cache.groups(0, [cache.place(table_of(1, 2), 20)])[1]
    assert int8_group.key_scales is not None
    assert int8_group.key_scales[0].shape == (1, 20)


def test_groups_have_the_shape_that_paged_kernels_take() -> None:
    cache = new_cache(PageOrder.PAGE_MAJOR, [1])
    assert (cache.keys(0, 0).shape, cache.keys(0, 0).dtype) == ((6, 16, 2, SIZE), torch.float32)
    assert (cache.values(0, 1).shape, cache.values(0, 1).dtype) == ((6, 16, 1, SIZE), torch.int8)
    assert cache.keys(0, 1).is_contiguous()


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("int8_heads", [[0, 0], [3, 3], [1, 0], MIXED], ids=str)
def test_a_page_takes_what_its_heads_take(order: PageOrder, dtype: torch.dtype, int8_heads: list[int]) -> None:
    quantised = sum(int8_heads)
    floats = len(int8_heads) * HEADS - quantised
    per_token = 2 * (floats * SIZE * dtype.itemsize + quantised * (SIZE + 4))
    assert new_cache(order, int8_heads, dtype).page_bytes == 16 * per_token


def test_without_int8_heads_all_layers_are_one_tensor() -> None:
    cache = new_cache(PageOrder.HEAD_MAJOR, [0, 0, 0])
    assert cache.keys(2).untyped_storage().data_ptr() == cache.keys(0).untyped_storage().data_ptr()
    assert len(cache.groups(1, [])) == 1


@pytest.mark.parametrize("int8_heads", [[1], [4, 0], [-1, 0]])
def test_heads_that_are_not_there_are_refused(int8_heads: list[int]) -> None:
    with pytest.raises(LayoutError, match="is not a number of heads up to 3 for each of 2 layers"):
        ZeroCopyKVCache(LAYOUT, 2, HEADS, SIZE, torch.float32, CPU, int8_heads=int8_heads)


@st.composite
def traffic(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    page, slot = st.integers(0, 5), st.integers(0, 2)
    write = st.tuples(st.just("write"), page, st.integers(0, 15), st.integers(1, 16))
    copy = st.tuples(st.just("copy"), page, page, st.integers(1, 16))
    store, load = st.tuples(st.just("store"), page, slot, st.just(0)), st.tuples(st.just("load"), slot, page, st.just(0))
    return draw(st.lists(st.one_of(write, copy, store, load), max_size=30))


@given(
    order=st.sampled_from(PageOrder),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    int8_heads=st.lists(st.integers(0, HEADS), min_size=1, max_size=3),
    operations=traffic(),
)
@settings(max_examples=100, deadline=None)
def test_pages_keep_their_content_whatever_moves(
    order: PageOrder, dtype: torch.dtype, int8_heads: list[int], operations: list[tuple[str, int, int, int]]
) -> None:
    cache = new_cache(order, int8_heads, dtype)
    cache.attach_host(memoryview(bytearray(3 * cache.page_bytes)))
    for layer in range(len(int8_heads)):
        zeros = torch.zeros(96, HEADS, SIZE, dtype=dtype)
        cache.write(layer, torch.arange(96), zeros, zeros)
    device = torch.zeros(6, len(int8_heads), 16, HEADS, SIZE)
    host = torch.zeros(3, *device.shape[1:])
    for seed, (kind, first, second, count) in enumerate(operations):
        match kind:
            case "write":
                end = min(16, second + count)
                new = random(end - second, seed, dtype)
                for layer, quantised in enumerate(int8_heads):
                    cache.write(layer, torch.arange(first * 16 + second, first * 16 + end), new, -new)
                    device[first, layer, second:end] = stored(new, quantised).transpose(0, 1)
            case "copy":
                cache.execute([Copy(first, second, count)])
                device[second, :, :count] = device[first, :, :count].clone()
            case "store":
                cache.execute([Store(first, second)])
                host[second] = device[first]
            case "load":
                cache.execute([Load(first, second)])
                device[second] = host[first]
    for page in range(6):
        for layer in range(len(int8_heads)):
            keys, values = read(cache, layer, table_of(page), 16)
            assert torch.equal(keys.transpose(0, 1), device[page, layer])
            assert torch.equal(values, -keys)
