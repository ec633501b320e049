"""Each reference operation against its formula, written out element by element in float64."""

from __future__ import annotations

import math

import pytest
import torch

from npufleet_kernels import attention, linear, rms_norm, rope, silu_mul

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = sorted(TOLERANCE, key=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_the_matrix_product_with_bias(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = random(3, 8, dtype=dtype), random(5, 8, dtype=dtype, seed=1), random(5, dtype=dtype, seed=2)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    close(linear.reference(x, weight, bias if with_bias else None), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_scales_to_unit_mean_square_and_returns_the_next_residual(dtype: torch.dtype, with_residual: bool) -> None:
    x, weight, residual = random(4, 16, dtype=dtype), random(16, dtype=dtype, seed=1), random(4, 16, dtype=dtype, seed=2)
    total = x + residual if with_residual else x
    wide = total.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    normed, following = rms_norm.reference(x, weight, 1e-5, residual if with_residual else None)
    close(normed, expected)
    assert torch.equal(following, total)
    assert normed.dtype == dtype


def test_rms_norm_of_zeros_is_zero() -> None:
    normed, _ = rms_norm.reference(torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert torch.equal(normed, torch.zeros(2, 8))


@pytest.mark.parametrize("head_size", [2, 8, 64])
def test_rope_turns_each_pair_by_its_position(head_size: int) -> None:
    half = head_size // 2
    query, key = random(3, 4, head_size), random(3, 2, head_size, seed=1)
    angles = torch.tensor([[position * 10000 ** (-2 * i / head_size) for i in range(half)] for position in (0, 1, 7)])
    doubled = torch.cat((angles, angles), dim=-1)
    for rotated, original in zip(rope.reference(query, key, doubled.cos(), doubled.sin()), (query, key), strict=True):
        for token in range(3):
            for i in range(half):
                a, b = original[token, :, i].double(), original[token, :, i + half].double()
                cos, sin = math.cos(angles[token, i]), math.sin(angles[token, i])
                close(rotated[token, :, i], a * cos - b * sin)
                close(rotated[token, :, i + half], a * sin + b * cos)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_gates_the_second_half_by_the_first(dtype: torch.dtype) -> None:
    gate, up = random(3, 6, dtype=dtype), random(3, 6, dtype=dtype, seed=1)
    wide = gate.double()
    close(silu_mul.reference(torch.cat((gate, up), dim=-1)), wide / (1 + torch.exp(-wide)) * up.double())


def naive_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence, one head and one token at a time. query (n, H, D); key, value (K, L, D)."""
    count, heads, size = query.shape
    group = heads // key.shape[0]
    output = torch.empty(count, heads, size, dtype=torch.float64)
    for token in range(count):
        visible = key.shape[1] - count + token + 1
        for head in range(heads):
            scores = key[head // group, :visible].double() @ query[token, head].double() * scale
            output[token, head] = torch.softmax(scores, 0) @ value[head // group, :visible].double()
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    ("query_lengths", "lengths"), [([1], [1]), ([1], [9]), ([5], [5]), ([3], [9]), ([1, 4, 1, 2], [7, 4, 1, 6])], ids=str
)
def test_attention_sees_the_past_and_itself_of_its_own_sequence(
    dtype: torch.dtype, heads: int, kv_heads: int, query_lengths: list[int], lengths: list[int]
) -> None:
    query = random(sum(query_lengths), heads, 8, dtype=dtype)
    keys = [random(kv_heads, length, 8, dtype=dtype, seed=10 + i) for i, length in enumerate(lengths)]
    values = [random(kv_heads, length, 8, dtype=dtype, seed=20 + i) for i, length in enumerate(lengths)]
    actual = attention.reference(query, keys, values, query_lengths, 8**-0.5)
    pieces = torch.split(query, query_lengths)
    expected = [naive_attention(q, k, v, 8**-0.5) for q, k, v in zip(pieces, keys, values, strict=True)]
    close(actual, torch.cat(expected))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_attention_over_several_query_blocks_equals_one_block(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK_TOKENS", 4)
    count = 8 + extra
    query, key, value = random(count, 4, 8), random(2, count + 3, 8, seed=1), random(2, count + 3, 8, seed=2)
    close(attention.reference(query, [key], [value], [count], 0.5), naive_attention(query, key, value, 0.5))
