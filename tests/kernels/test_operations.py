"""Each reference operation against its formula, written out element by element in float64."""

from __future__ import annotations

import math

import pytest
import torch

from npufleet_kernels import gelu, layer_norm, linear, moe_experts, moe_route, rms_norm, rope, silu_mul

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


def test_rope_leaves_what_lies_beyond_the_angles_as_it_is() -> None:
    query, key = random(3, 4, 12), random(3, 2, 12, seed=1)
    cos, sin = random(3, 4, seed=2).repeat(1, 2), random(3, 4, seed=3).repeat(1, 2)
    turned = rope.reference(query, key, cos, sin)
    whole = rope.reference(query[..., :8], key[..., :8], cos, sin)
    for rotated, part, original in zip(turned, whole, (query, key), strict=True):
        assert torch.equal(rotated[..., :8], part)
        assert torch.equal(rotated[..., 8:], original[..., 8:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm_has_zero_mean_and_unit_variance_before_weight_and_bias(dtype: torch.dtype, with_residual: bool) -> None:
    x, residual = random(4, 16, dtype=dtype) + 3, random(4, 16, dtype=dtype, seed=2)
    weight, bias = random(16, dtype=dtype, seed=1), random(16, dtype=dtype, seed=3)
    wide = (x + residual if with_residual else x).double()
    centred = wide - wide.mean(-1, keepdim=True)
    expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight.double() + bias.double()
    close(layer_norm.reference(x, weight, bias, 1e-5, residual if with_residual else None), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_is_that_of_the_error_function_or_of_the_cubic_polynomial(dtype: torch.dtype) -> None:
    x = random(5, 7, dtype=dtype) * 3
    wide = x.double()
    close(gelu.reference(x, False), wide * (1 + torch.erf(wide / math.sqrt(2))) / 2)
    close(gelu.reference(x, True), wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) / 2)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_token_goes_to_its_most_probable_experts(normalise: bool) -> None:
    scores = random(6, 5)
    weights, experts = moe_route.reference(scores, 3, normalise)
    probabilities = torch.softmax(scores.double(), -1)
    for token in range(6):
        best = sorted(range(5), key=lambda expert: -probabilities[token, expert])[:3]
        assert experts[token].tolist() == best
        chosen = probabilities[token, best]
        close(weights[token], chosen / chosen.sum() if normalise else chosen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_add_up_by_their_weights(dtype: torch.dtype) -> None:
    x, weights = random(5, 8, dtype=dtype), random(5, 2, dtype=dtype, seed=1)
    experts = torch.tensor([[0, 3], [3, 0], [1, 3], [0, 1], [3, 1]])
    gate_up, down = random(4, 6, 8, dtype=dtype, seed=2), random(4, 8, 3, dtype=dtype, seed=3)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for token in range(5):
        for share, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += share * (down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    actual = moe_experts.reference(x, weights, experts, gate_up, down).double()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype] * 4, atol=TOLERANCE[dtype] * 4)


def test_a_token_gets_the_same_from_its_experts_whoever_is_beside_it() -> None:
    x, (weights, experts) = random(9, 8), moe_route.reference(random(9, 4, seed=1), 2, True)
    gate_up, down = random(4, 6, 8, seed=2), random(4, 8, 3, seed=3)
    together = moe_experts.reference(x, weights, experts, gate_up, down)
    for token in range(9):
        row = slice(token, token + 1)
        alone = moe_experts.reference(x[row], weights[row], experts[row], gate_up, down)
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-6)
