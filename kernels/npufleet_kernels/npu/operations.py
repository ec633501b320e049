"""NPU variants of the operations: each has the signature and meaning of its reference, and takes the reference where no operator fits."""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_kernels import gelu as gelu_module
from npufleet_kernels import kv_write_int8 as kv_write_int8_module
from npufleet_kernels import layer_norm as layer_norm_module
from npufleet_kernels import linear_int8 as linear_int8_module
from npufleet_kernels import rms_norm as rms_norm_module
from npufleet_kernels import rope as rope_module
from npufleet_kernels import silu_mul as silu_mul_module
from npufleet_kernels.npu import operators
from npufleet_kernels.npu.routes import otherwise


@otherwise("rms_norm", rms_norm_module.reference)
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `rms_norm.reference`."""
    if residual is None:
        return operators.rms_norm(x, weight, epsilon), x
    return operators.add_rms_norm(x, residual, weight, epsilon)


@otherwise("layer_norm", layer_norm_module.reference)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor:
    """See `layer_norm.reference`."""
    if residual is None:
        return operators.layer_norm(x, weight, bias, epsilon)
    return operators.add_layer_norm(x, residual, weight, bias, epsilon)


@otherwise("rope", rope_module.reference)
def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `rope.reference`. Where only a part of a head is rotated, that part goes through the operator."""
    size = cos.shape[-1]
    if size == query.shape[-1]:
        return operators.rotate(query, key, cos, sin)
    turned = operators.rotate(query[..., :size], key[..., :size], cos, sin)
    return torch.cat((turned[0], query[..., size:]), dim=-1), torch.cat((turned[1], key[..., size:]), dim=-1)


@otherwise("silu_mul", silu_mul_module.reference)
def silu_mul(gate_up: Tensor) -> Tensor:
    """See `silu_mul.reference`."""
    return operators.swiglu(gate_up)


@otherwise("gelu", gelu_module.reference)
def gelu(x: Tensor, cubic: bool) -> Tensor:
    """See `gelu.reference`."""
    return operators.gelu(x, cubic)


@otherwise("linear_int8", linear_int8_module.reference)
def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `linear_int8.reference`; the scale is rounded to x's type, as the operator wants it."""
    return operators.weight_quantised_matmul(x, weight, scale, bias)


@otherwise("linear_int8", linear_int8_module.reference)
def linear_int8_w8a8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear_int8.reference`, but x is quantised by row too, which moves an output by at most `x_scale / 2 · Σ|weight|` more."""
    values, x_scale = operators.dynamic_quantise(x)
    output = operators.quantised_matmul(values, x_scale, weight, scale, x.dtype)
    return output if bias is None else output + bias.to(output.dtype)


@otherwise("kv_write_int8", kv_write_int8_module.reference)
def kv_write_int8(rows: Tensor, scales: Tensor, slots: Tensor, new: Tensor) -> None:
    """See `kv_write_int8.reference`."""
    values, steps = operators.dynamic_quantise(new)
    rows.index_copy_(1, slots, values.transpose(0, 1))
    scales.index_copy_(1, slots, steps.transpose(0, 1))
