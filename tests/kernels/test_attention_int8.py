"""Every variant of attention over INT8 keys and values: exact for what is stored, and close to what was quantised by a bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from npufleet_kernels import attention, int8
from npufleet_kernels.dispatch import VARIANTS

NAMES = sorted(VARIANTS["attention_int8"])
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of float32's sums, or of the result to its type, for magnitudes up to 4."""
DTYPES = sorted(ROUNDING, key=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = True) -> torch.Tensor:
    """One sequence in float64. query (n, H, D); key, value (K, L, D)."""
    count, heads, _ = query.shape
    length = key.shape[1]
    key, value = (part.double().repeat_interleave(heads // key.shape[0], 0) for part in (key, value))
    scores = query.double().transpose(0, 1) @ key.transpose(1, 2) * scale
    if causal:
        scores.masked_fill_(torch.ones(count, length, dtype=torch.bool).triu(length - count + 1), float("-inf"))
    return (torch.softmax(scores, -1) @ value).transpose(0, 1)


def run(
    name: str, query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], lengths: list[int], *rest: object
) -> torch.Tensor:
    stored = [[int8.quantise(part) for part in parts] for parts in (keys, values)]
    (key_rows, key_scales), (value_rows, value_scales) = (zip(*parts, strict=True) if parts else ((), ()) for parts in stored)
    result: torch.Tensor = VARIANTS["attention_int8"][name](query, key_rows, key_scales, value_rows, value_scales, lengths, *rest)
    return result


def bound(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """(n, H, 1): largest error that quantising key and value can make, as `attention_int8.reference` says."""
    group = query.shape[1] // key.shape[0]
    key_step, value_step, largest = (
        part.double().repeat_interleave(group).unsqueeze(0)
        for part in (int8.quantise(key)[1].amax(1), int8.quantise(value)[1].amax(1), value.abs().amax((1, 2)))
    )
    wrong = scale * key_step / 2 * query.double().abs().sum(-1)
    return (value_step / 2 + torch.expm1(2 * wrong) * largest).unsqueeze(-1)


def stored(part: torch.Tensor) -> torch.Tensor:
    return int8.dequantise(*int8.quantise(part))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_lengths", "lengths"), [([], []), ([1], [1]), ([1], [9]), ([5], [5]), ([3], [9]), ([1, 4, 1, 2], [7, 4, 1, 6])], ids=str
)
def test_it_is_attention_over_what_is_stored_and_near_what_was_meant(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, causal: bool, query_lengths: list[int], lengths: list[int]
) -> None:
    query = random(sum(query_lengths), heads, 64, dtype=dtype)
    keys = [random(kv_heads, length, 64, seed=10 + i) for i, length in enumerate(lengths)]
    values = [random(kv_heads, length, 64, seed=20 + i) for i, length in enumerate(lengths)]
    actual = run(name, query, keys, values, query_lengths, 64**-0.5, causal)
    assert (actual.shape, actual.dtype) == (query.shape, dtype)
    for part, q, k, v in zip(torch.split(actual, query_lengths), torch.split(query, query_lengths), keys, values, strict=True):
        tolerance = ROUNDING[dtype] * 4
        torch.testing.assert_close(part.double(), exact(q, stored(k), stored(v), 64**-0.5, causal), rtol=0, atol=tolerance)
        assert ((part.double() - exact(q, k, v, 64**-0.5, causal)).abs() <= bound(q, k, v, 64**-0.5) + tolerance).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_heads_of_every_size(name: str, size: int) -> None:
    query, key, value = random(3, 4, size), random(2, 20, size, seed=1), random(2, 20, size, seed=2)
    actual = run(name, query, [key], [value], [3], size**-0.5).double()
    torch.testing.assert_close(actual, exact(query, stored(key), stored(value), size**-0.5), rtol=0, atol=1e-4)
    assert ((actual - exact(query, key, value, size**-0.5)).abs() <= bound(query, key, value, size**-0.5) + 1e-4).all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 21), earlier=st.integers(0, 21), query_block=st.integers(1, 9), key_block=st.integers(1, 9))
def test_the_size_of_the_blocks_changes_nothing(name: str, count: int, earlier: int, query_block: int, key_block: int) -> None:
    query, key, value = random(count, 4, 8), random(2, count + earlier, 8, seed=1), random(2, count + earlier, 8, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK_TOKENS", query_block)
        patch.setattr(attention, "KEY_BLOCK_TOKENS", key_block)
        actual = run(name, query, [key], [value], [count], 0.5).double()
    torch.testing.assert_close(actual, exact(query, stored(key), stored(value), 0.5), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_edges_of_a_block_of_keys(name: str) -> None:
    size = attention.KEY_BLOCK_TOKENS
    for length in (size - 1, size, size + 1):
        query, key, value = random(2, 2, 8), random(1, length, 8, seed=1), random(1, length, 8, seed=2)
        actual = run(name, query, [key], [value], [2], 0.5).double()
        torch.testing.assert_close(actual, exact(query, stored(key), stored(value), 0.5), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_scales_may_lie_in_any_order(name: str) -> None:
    query = random(3, 4, 8)
    (keys, key_scales), (values, value_scales) = (int8.quantise(random(2, 9, 8, seed=seed)) for seed in (1, 2))
    turned = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (keys, key_scales, values, value_scales)]
    expected = VARIANTS["attention_int8"][name](query, [keys], [key_scales], [values], [value_scales], [3], 0.5)
    assert not turned[0].is_contiguous()
    actual = VARIANTS["attention_int8"][name](query, *([part] for part in turned), [3], 0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it without annotations
    """Remembers the elements of the largest tensor that any operation makes; a view of what is stored takes no memory."""

    def __init__(self, stored: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.elements = 0
        self.stored = {part.untyped_storage().data_ptr() for part in stored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # torch's own signature
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.stored:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("count", [1, 300])
def test_scratch_memory_is_the_same_for_every_length(count: int) -> None:
    sizes = []
    for length in (4096, 8192):
        query = random(count, 2, 4)
        parts = [part for seed in (1, 2) for part in int8.quantise(random(1, length, 4, seed=seed))]
        with LargestResult(parts) as seen:
            VARIANTS["attention_int8"]["blocked"](query, *([part] for part in parts), [count], 0.5)
        sizes.append(seen.elements)
    assert sizes[0] == sizes[1]
