"""INT8 weights and KV against float ones, within bounds that follow from the rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npufleet_kernels import int8, kv_write, kv_write_int8, linear_int8, moe_experts, moe_experts_int8, moe_route, silu_mul

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of rounding to a type."""
DTYPES = sorted(ROUNDING, key=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sum_bound(terms: torch.Tensor, count: int) -> torch.Tensor:
    """Error of a float32 sum of `count` products whose magnitudes add up to `terms` (Higham 2002, section 3.1), with its scaling."""
    return terms * (count + 4) * ROUNDING[torch.float32] * 1.01


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_a_value_is_off_by_half_a_step_at_most(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float32)
    values, scale = int8.quantise(x)
    assert (values.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert values.abs().max() <= int8.LARGEST
    # A quotient up to 127 is rounded by 127 · 2^-24 at most; a scale below the normal range by half the smallest number there is.
    slack = scale.double() * 127 * 2**-22 + 128 * 2.0**-149
    assert ((x.double() - values.double() * scale.double()).abs() <= scale.double() / 2 + slack).all()


@pytest.mark.parametrize(
    ("row", "stored"),
    [([127, 0.5, 1.5, -0.5, -1.5, 2.5], [127, 0, 2, 0, -2, 2]), ([-254, 3, 254], [-127, 2, 127]), ([0, -0.0], [0, 0]), ([1e-45], [0])],
    ids=str,
)
def test_halves_are_rounded_to_the_even_value(row: list[float], stored: list[int]) -> None:
    values, scale = int8.quantise(torch.tensor(row, dtype=torch.float32))
    if row != [1e-45]:
        assert values.tolist() == stored
    assert scale == torch.tensor(row).abs().max() / 127


@pytest.mark.parametrize("shape", [(0, 4), (3, 1), (2, 5, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_has_its_own_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    values, scales = int8.quantise(x)
    assert (values.shape, scales.shape) == (shape, shape[:-1])
    assert (int8.dequantise(values, scales) - x).abs().le(scales.unsqueeze(-1) * 0.5001).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_undefined_stays_undefined(bad: float) -> None:
    values, scales = int8.quantise(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert not int8.dequantise(values, scales)[0].isfinite().all()
    assert int8.dequantise(values, scales)[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(("out", "size"), [(1, 1), (7, 64), (9, 33)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_output_is_off_by_what_its_weights_are(dtype: torch.dtype, tokens: int, out: int, size: int, with_bias: bool) -> None:
    x, weight, bias = random(tokens, size, dtype=dtype), random(out, size, seed=1), random(out, seed=2)
    values, scale = int8.quantise(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_int8, "BLOCK_ROWS", 4)
        actual = linear_int8.reference(x, values, scale, bias if with_bias else None)
    assert (actual.shape, actual.dtype) == ((tokens, out), dtype)
    stored = values.double() * scale.double().unsqueeze(1)
    added = bias.double() if with_bias else torch.zeros(out, dtype=torch.float64)
    exact = x.double() @ stored.T + added
    terms = x.double().abs() @ stored.abs().T + added.abs()
    rounding = sum_bound(terms, size) + exact.abs() * ROUNDING[dtype] * 1.01
    assert ((actual.double() - exact).abs() <= rounding).all()
    unquantised = x.double() @ weight.double().T + added
    off = x.double().abs().sum(1, keepdim=True) * scale.double() * 0.5001
    assert ((actual.double() - unquantised).abs() <= off + rounding).all()


def test_an_output_does_not_depend_on_the_tokens_beside_it() -> None:
    x, (values, scale) = random(9, 64), int8.quantise(random(40, 64, seed=1))
    together = linear_int8.reference(x, values, scale)
    for token in range(9):
        torch.testing.assert_close(linear_int8.reference(x[token : token + 1], values, scale)[0], together[token], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_experts_are_off_by_what_their_weights_are(dtype: torch.dtype, tokens: int) -> None:
    x, (shares, experts) = random(tokens, 16, dtype=dtype), moe_route.reference(random(tokens, 4, dtype=dtype, seed=1), 2, True)
    gate_up, down = int8.quantise(random(4, 12, 16, seed=2)), int8.quantise(random(4, 16, 6, seed=3))
    actual = moe_experts_int8.reference(x, shares, experts, *gate_up, *down)
    wide = [part.to(dtype) for part in (int8.dequantise(*gate_up), int8.dequantise(*down))]
    expected = moe_experts.reference(x, shares, experts, *wide)
    assert actual.dtype == dtype
    # Both round what lies between their three products to x's type, and the float one its weights: five roundings of sums like these.
    scale = silu_mul.reference(x.abs().float() @ wide[0][0].abs().float().T).abs().amax() if tokens else torch.tensor(1.0)
    tolerance = 5 * ROUNDING[dtype] * 16 * float(scale) * float(wide[1].abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("page_major", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_new_tokens_go_to_their_slots_and_nowhere_else(page_major: bool, tokens: int) -> None:
    new, slots = random(tokens, 3, 8), torch.tensor([7, 2, 11, 0, 5])[:tokens]
    floats, rows, scales = torch.full((12, 3, 8), 9.0), torch.full((12, 3, 8), 9, dtype=torch.int8), torch.full((12, 3), 9.0)
    views = [part.transpose(0, 1) if page_major else part.transpose(0, 1).contiguous() for part in (floats, rows, scales)]
    kv_write.reference(views[0], slots, new)
    kv_write_int8.reference(views[1], views[2], slots, new)
    values, steps = int8.quantise(new)
    assert torch.equal(views[0][:, slots], new.transpose(0, 1))
    assert torch.equal(views[1][:, slots], values.transpose(0, 1))
    assert torch.equal(views[2][:, slots], steps.transpose(0, 1))
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert all((part[:, untouched] == 9).all() for part in views)
