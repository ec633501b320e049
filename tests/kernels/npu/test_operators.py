"""Each NPU operator's variant against the reference, on tensors of the CPU and of the simulated device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from npufleet_kernels import gelu, layer_norm, linear_int8, rms_norm, rope, silu_mul
from npufleet_kernels.dispatch import VARIANTS
from npufleet_kernels.int8 import quantise
from npufleet_kernels.npu import operations, operators, routes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = sorted(TOLERANCE, key=str)
TOKENS = (1, 2, 129)
DEVICES = ("cpu", "npu")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def other_paths(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Operations that went another way than the operator, as the log says; a test that does not ask for them wants none."""
    routes._say.cache_clear()
    asked = []

    def names() -> list[str]:
        asked.append(True)
        return [record.__dict__["operation"] for record in caplog.records if record.name == routes.logger.name]

    with caplog.at_level(logging.WARNING, logger=routes.logger.name):
        yield names
    assert asked or not names()


def same(device: str, variant: Callable[..., object], reference: Callable[..., object], *given: object, factor: float = 1.0) -> None:
    """What `variant` gives on `device` is what `reference` gives on the CPU, but for rounding."""
    moved = [one.clone().to(device) if isinstance(one, Tensor) else one for one in given]
    actual, expected = variant(*moved), reference(*given)
    pairs = zip(actual, expected, strict=True) if isinstance(actual, tuple) and isinstance(expected, tuple) else [(actual, expected)]
    for one, other in pairs:
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        assert one.device.type == device
        tolerance = TOLERANCE[other.dtype] * factor
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(device: str, dtype: torch.dtype, tokens: int, with_residual: bool) -> None:
    x, weight, bias = random(tokens, 96, dtype=dtype), random(96, dtype=dtype, seed=1), random(96, dtype=dtype, seed=2)
    residual = random(tokens, 96, dtype=dtype, seed=3) if with_residual else None
    same(device, operations.rms_norm, rms_norm.reference, x, weight, 1e-5, residual)
    same(device, operations.layer_norm, layer_norm.reference, x, weight, bias, 1e-5, residual, factor=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 64), (128, 128), (128, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (3, 3)])
def test_rope(device: str, dtype: torch.dtype, tokens: int, head_size: int, rotated: int, heads: int, kv_heads: int) -> None:
    query, key = random(tokens, heads, head_size, dtype=dtype), random(tokens, kv_heads, head_size, dtype=dtype, seed=1)
    angles = random(tokens, rotated // 2, seed=2).repeat(1, 2)
    same(device, operations.rope, rope.reference, query, key, angles.cos().to(dtype), angles.sin().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_leaves_the_projection_alone_that_query_and_key_are_views_of(dtype: torch.dtype) -> None:
    whole = random(5, 8, 64, dtype=dtype)
    before = whole.clone()
    angles = random(5, 32, seed=2).repeat(1, 2)
    operations.rope(whole[:, :6], whole[:, 6:7], angles.cos().to(dtype), angles.sin().to(dtype))
    assert torch.equal(whole[:, 7:], before[:, 7:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_activations(device: str, dtype: torch.dtype, tokens: int) -> None:
    x = random(tokens, 64, dtype=dtype) * 3
    same(device, operations.silu_mul, silu_mul.reference, x)
    same(device, operations.gelu, gelu.reference, x, False)
    same(device, operations.gelu, gelu.reference, x, True)


def test_the_cubic_gelu_is_not_the_fast_one() -> None:
    x = torch.linspace(-4, 4, 101)
    fast = x * torch.sigmoid(1.702 * x)
    assert (operations.gelu(x, True) - fast).abs().max() > 1e-2
    torch.testing.assert_close(operations.gelu(x, True), gelu.reference(x, True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_weights(device: str, dtype: torch.dtype, tokens: int, with_bias: bool) -> None:
    x, (weight, scale) = random(tokens, 64, dtype=dtype), quantise(random(48, 64, seed=1) / 8)
    bias = random(48, dtype=dtype, seed=2) if with_bias else None
    same(device, operations.linear_int8, linear_int8.reference, x, weight, scale, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_int8_activations_move_an_output_within_their_bound(dtype: torch.dtype) -> None:
    x, (weight, scale) = random(7, 64, dtype=dtype), quantise(random(48, 64, seed=1) / 8)
    exact = linear_int8.reference(x, weight, scale)
    bound = quantise(x)[1].unsqueeze(1) / 2 * (weight.float().abs().sum(1) * scale)
    actual = operations.linear_int8_w8a8(x, weight, scale)
    assert ((actual.float() - exact.float()).abs() <= bound + TOLERANCE[dtype] * exact.float().abs() + TOLERANCE[dtype]).all()
    assert not torch.equal(actual, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_matmul_and_sum_over_the_only_rank_is_the_product(device: str) -> None:
    x, weight = random(5, 64, dtype=torch.bfloat16), random(32, 64, dtype=torch.bfloat16, seed=1)
    same(device, lambda a, b: operators.matmul_all_reduce(a, b, "group", 1), torch.nn.functional.linear, x, weight)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_hold_the_same_weight(device: str) -> None:
    same(device, operators.to_tiles, lambda weight: weight, random(32, 64, dtype=torch.bfloat16))


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.1, 0.5, 0.15, 0.25]]))
    kept = operators.filter_top_k_top_p(logits, torch.tensor([1.0, 0.7]), torch.tensor([3, 4], dtype=torch.int32))
    assert kept.isfinite().tolist() == [[False, True, True, True], [False, True, False, True]]


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("rms_norm", lambda: operations.rms_norm(random(2, 8), random(8, dtype=torch.bfloat16), 1e-5)),
        ("rope", lambda: operations.rope(random(2, 4, 32), random(2, 1, 32), random(2, 32), random(2, 32))),
        ("linear_int8", lambda: operations.linear_int8(random(2, 64), *quantise(random(8, 64)))),
    ],
)
def test_what_an_operator_refuses_goes_another_way_and_is_logged_once(
    operation: str, call: Callable[[], object], other_paths: Callable[[], list[str]]
) -> None:
    call()
    call()
    assert other_paths() == [operation]


@pytest.mark.parametrize("operation", sorted(name for name, variants in VARIANTS.items() if "npu" in variants))
def test_every_npu_variant_has_a_reference(operation: str) -> None:
    assert "reference" in VARIANTS[operation]


def test_a_step_without_tokens_is_computed_without_a_word() -> None:
    empty = torch.zeros(0, 64)
    assert operations.rms_norm(empty, random(64), 1e-5)[0].shape == (0, 64)
    assert operations.silu_mul(empty).shape == (0, 32)
