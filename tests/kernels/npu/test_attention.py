"""NPU attention against the reference, from pages and without, on tensors of the CPU and of the simulated device."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from npufleet_kernels import attention, attention_int8, int8
from npufleet_kernels.errors import UnsupportedCallError
from npufleet_kernels.npu import attention as npu_attention
from npufleet_kernels.npu import fused_attention, routes
from npufleet_kernels.paged_rows import PagedRows

PAGE = 128
PAGES = 9
BATCHES = {
    "one token": ([1], [1]),
    "prompt": ([5], [5]),
    "block borders": ([127, 128, 129], [127, 128, 129]),
    "decode": ([1, 1, 1], [128, 129, 300]),
    "mixed": ([1, 1, 40, 1], [17, 256, 140, 129]),
    "second part of a prompt": ([30], [200]),
}


@pytest.fixture(autouse=True)
def other_paths_are_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """In each test anew: see `said`."""
    routes._say.cache_clear()
    with caplog.at_level(logging.WARNING, logger=routes.logger.name):
        yield


def said(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {record.__dict__["path"] for record in caplog.records if record.name == routes.logger.name}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_of(lengths: list[int]) -> Tensor:
    """Pages scattered over the cache, no page twice."""
    free = list(reversed(range(PAGES)))
    rows = [[free.pop() for _ in range(-(-length // PAGE))] for length in lengths]
    widest = max(map(len, rows))
    return torch.tensor([row[::-1] + [0] * (widest - len(row)) for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_paged(
    device: str, batch: str, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    new, lengths = BATCHES[batch]
    query = random(sum(new), heads, head_size, dtype=dtype)
    sides = [random(PAGES, PAGE, kv_heads, head_size, dtype=dtype, seed=seed) for seed in (1, 2)]
    keys, values = (PagedRows(pages.to(device), table_of(lengths).to(device), tuple(lengths)) for pages in sides)
    expected = attention.full(query.float(), [k.cpu().float() for k in keys], [v.cpu().float() for v in values], new, head_size**-0.5)
    actual = npu_attention.attend(query.to(device), keys, values, new, head_size**-0.5)
    assert actual.device.type == device
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=2e-2, atol=2e-2)
    one_call = head_size == 128 and dtype is torch.bfloat16
    assert said(caplog) == (set() if one_call else {"layout BSND, prompts one by one"})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_without_pages(causal: bool, batch: str, caplog: pytest.LogCaptureFixture) -> None:
    new, lengths = BATCHES[batch]
    query = random(sum(new), 4, 128)
    keys, values = ([random(2, length, 128, seed=seed + i) for i, length in enumerate(lengths)] for seed in (10, 20))
    expected = attention.full(query.float(), [k.float() for k in keys], [v.float() for v in values], new, 0.1, causal)
    torch.testing.assert_close(npu_attention.attend(query, keys, values, new, 0.1, causal).float(), expected, rtol=2e-2, atol=2e-2)
    assert said(caplog) == set()


def test_float32_is_computed_by_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    query, keys = random(3, 2, 128, dtype=torch.float32), [random(1, 3, 128, dtype=torch.float32)]
    assert torch.equal(npu_attention.attend(query, keys, keys, [3], 0.1), attention.blocked(query, keys, keys, [3], 0.1))
    assert said(caplog) == {"reference, in blocks"}


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("head_size", [64, 128])
def test_int8(device: str, batch: str, head_size: int, caplog: pytest.LogCaptureFixture) -> None:
    new, lengths = BATCHES[batch]
    query = random(sum(new), 6, head_size)
    table = table_of(lengths).to(device)
    parts = []
    for seed in (1, 2):
        rows, scales = int8.quantise(random(PAGES, PAGE, 2, head_size, dtype=torch.float32, seed=seed))
        parts += [PagedRows(rows.to(device), table, tuple(lengths)), PagedRows(scales.to(device), table, tuple(lengths))]
    keys, key_scales, values, value_scales = parts
    on_host = [[one.cpu() for one in part] for part in parts]
    expected = attention_int8.reference(query, on_host[0], on_host[1], on_host[2], on_host[3], new, head_size**-0.5)
    actual = npu_attention.attend_int8(query.to(device), keys, key_scales, values, value_scales, new, head_size**-0.5)
    torch.testing.assert_close(actual.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert said(caplog) == (set() if max(new) == 1 else {"in blocks"})


def test_a_part_of_a_batch_is_the_same_sequences() -> None:
    rows = PagedRows(random(PAGES, PAGE, 2, 16), table_of([130, 5, 260]), (130, 5, 260))
    part = rows[1:]
    assert len(part) == 2
    for one, other in zip(part, list(rows)[1:], strict=True):
        assert torch.equal(one, other)


GOOD = {
    "query": random(3, 4, 128),
    "key_pages": random(4, PAGE, 2, 128),
    "value_pages": random(4, PAGE, 2, 128),
    "table": torch.zeros((2, 2), dtype=torch.int32),
    "query_lengths": [2, 1],
    "lengths": [2, 130],
    "scale": 0.1,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": random(3, 4, 64), "key_pages": random(4, PAGE, 2, 64), "value_pages": random(4, PAGE, 2, 64)}, "head size 64"),
        ({"query": random(3, 4, 128, dtype=torch.float32)}, "float32"),
        ({"query": random(3, 5, 128)}, "5 heads are no multiple of 2"),
        ({"query": random(3, 130, 128)}, "65 heads for a KV head"),
        ({"key_pages": random(4, 64, 2, 128), "value_pages": random(4, 64, 2, 128)}, "pages of 64 tokens"),
        ({"key_pages": random(4, 2, PAGE, 128).transpose(1, 2)}, "key_pages"),
        ({"value_pages": random(5, PAGE, 2, 128)}, "value_pages"),
        ({"table": torch.zeros((2, 2), dtype=torch.int64)}, "int64"),
        ({"table": torch.zeros((2, 1), dtype=torch.int32)}, "130 tokens need 2 pages, the table has 1"),
        ({"table": torch.zeros((3, 2), dtype=torch.int32)}, "3 rows of the table"),
        ({"query_lengths": [2, 2]}, "query lengths add up to 4, there are 3"),
        ({"query_lengths": [3, 0]}, "each sequence has a new token"),
        ({"lengths": [1, 130]}, "more new tokens than tokens"),
        ({"lengths": [2]}, "2 query lengths for 1 sequences"),
        ({"query": random(0, 4, 128)}, "is empty"),
    ],
)
def test_what_the_operator_does_not_take_is_refused_before_the_call(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedCallError, match=named):
        fused_attention.paged_tnd(**{**GOOD, **change})  # type: ignore[arg-type] # the table's values have many types
    assert fused_attention.paged_tnd(**GOOD).shape == (3, 4, 128)  # type: ignore[arg-type] # the same
