"""Every variant of attention against its formula, and against growth of its memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from npufleet_kernels import attention
from npufleet_kernels.dispatch import VARIANTS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = sorted(TOLERANCE, key=str)
OPERATIONS = ("attention_full", "attention_two_phase", "attention_blocked")
VARIANT_OF = {f"{operation} {name}": variant for operation in OPERATIONS for name, variant in VARIANTS[operation].items()}
NAMES = sorted(VARIANT_OF)
BOUNDED = sorted(name for name in NAMES if not name.startswith("attention_full"))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = True) -> torch.Tensor:
    """One sequence, one head and one token at a time. query (n, H, D); key, value (K, L, D)."""
    count, heads, size = query.shape
    group = heads // key.shape[0]
    output = torch.empty(count, heads, size, dtype=torch.float64)
    for token in range(count):
        visible = key.shape[1] - count + token + 1 if causal else key.shape[1]
        for head in range(heads):
            scores = key[head // group, :visible].double() @ query[token, head].double() * scale
            output[token, head] = torch.softmax(scores, 0) @ value[head // group, :visible].double()
    return output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_lengths", "lengths"), [([1], [1]), ([1], [9]), ([5], [5]), ([3], [9]), ([1, 4, 1, 2], [7, 4, 1, 6])], ids=str
)
def test_a_token_sees_what_it_may_see_of_its_own_sequence(
    name: str, dtype: torch.dtype, heads: int, kv_heads: int, causal: bool, query_lengths: list[int], lengths: list[int]
) -> None:
    query = random(sum(query_lengths), heads, 8, dtype=dtype)
    keys = [random(kv_heads, length, 8, dtype=dtype, seed=10 + i) for i, length in enumerate(lengths)]
    values = [random(kv_heads, length, 8, dtype=dtype, seed=20 + i) for i, length in enumerate(lengths)]
    actual = VARIANT_OF[name](query, keys, values, query_lengths, 8**-0.5, causal)
    pieces = torch.split(query, query_lengths)
    close(actual, torch.cat([naive(q, k, v, 8**-0.5, causal) for q, k, v in zip(pieces, keys, values, strict=True)]))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 21), earlier=st.integers(0, 21), query_block=st.integers(1, 9), key_block=st.integers(1, 9))
def test_the_size_of_the_blocks_changes_nothing(name: str, count: int, earlier: int, query_block: int, key_block: int) -> None:
    query, key, value = random(count, 4, 8), random(2, count + earlier, 8, seed=1), random(2, count + earlier, 8, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK_TOKENS", query_block)
        patch.setattr(attention, "KEY_BLOCK_TOKENS", key_block)
        close(VARIANT_OF[name](query, [key], [value], [count], 0.5), naive(query, key, value, 0.5))


@pytest.mark.parametrize("name", NAMES)
def test_scores_beyond_the_range_of_exp_do_no_harm(name: str) -> None:
    query, key, value = random(6, 2, 8) * 100, random(2, 40, 8, seed=1) * 100, random(2, 40, 8, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "KEY_BLOCK_TOKENS", 4)
        close(VARIANT_OF[name](query, [key], [value], [6], 1.0), naive(query, key, value, 1.0))


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_may_lie_in_any_order(name: str) -> None:
    query = random(3, 4, 8)
    key, value = (random(9, 2, 8, seed=seed).transpose(0, 1) for seed in (1, 2))
    close(VARIANT_OF[name](query, [key], [value], [3], 0.5), naive(query, key, value, 0.5))


class LargestResult(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it without annotations
    """Remembers the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # torch's own signature
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


def largest_result(name: str, length: int) -> int:
    query, key, value = random(length, 2, 4), random(1, length, 4, seed=1), random(1, length, 4, seed=2)
    seen = LargestResult()  # type: ignore[no-untyped-call] # as above
    with seen:
        VARIANT_OF[name](query, [key], [value], [length], 0.5)
    return int(seen.elements)


@pytest.mark.parametrize("name", BOUNDED)
def test_scratch_grows_with_the_length_at_most(name: str) -> None:
    assert largest_result(name, 8192) <= 4 * largest_result(name, 2048)


def test_a_full_matrix_of_scores_is_held_only_by_the_strategy_for_short_sequences() -> None:
    length = 2 * attention.QUERY_BLOCK_TOKENS
    assert largest_result("attention_full reference", length) == 2 * length * length
    assert largest_result("attention_two_phase reference", length) == 2 * attention.QUERY_BLOCK_TOKENS * length


def test_scores_are_never_held_whole() -> None:
    length, heads, size = 4096, 2, 4
    assert largest_result("attention_blocked cpu", length) == length * heads * size
    assert largest_result("attention_blocked reference", length) == heads * attention.QUERY_BLOCK_TOKENS * attention.KEY_BLOCK_TOKENS
