"""One function for each NPU operator but attention's, with the constraints that its documentation states.

Each raises UnsupportedCallError before the call where one does not hold. torch_npu 2.13.0 documents the operators in their docstrings
(`torch_npu.npu_rms_norm.__doc__`); what a function checks is what is said there of Atlas A2 and A3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_kernels.npu.constraints import FLOAT_TYPES, HALF_TYPES, require, require_filled, require_shape, require_types

FRACTAL_NZ = 29
"""The format in which the matrix unit reads: tiles of 16 rows of 32 bytes."""
ROTARY_SIZES = (64, 128)
MAX_INNER = 65535
MAX_TOP_K = 1024
ALL_REDUCE_RANKS = (1, 2, 4, 8)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x (T, hidden), weight (hidden,) of one type. Returns (T, hidden)."""
    _check_norm("npu_rms_norm", x, weight)
    normed: Tensor = torch.ops.npu.npu_rms_norm(x, weight, epsilon=epsilon)[0]
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x, residual (T, hidden), weight (hidden,) of one type. Returns (the norm of the sum, the sum)."""
    _check_norm("npu_add_rms_norm", x, weight, residual=residual)
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon=epsilon)
    return normed, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """x (T, hidden), weight, bias (hidden,) of one type. Returns (T, hidden)."""
    _check_norm("npu_layer_norm_eval", x, weight, bias=bias)
    normed: Tensor = torch.ops.npu.npu_layer_norm_eval(x, list(weight.shape), weight, bias, epsilon)
    return normed


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """x, residual (T, hidden), weight, bias (hidden,) of one type. Returns the norm of the sum."""
    _check_norm("npu_add_layer_norm", x, weight, residual=residual, bias=bias)
    normed: Tensor = torch.ops.npu.npu_add_layer_norm(x, residual, weight, bias, epsilon, False)[0]
    return normed


def _check_norm(operator: str, x: Tensor, weight: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> None:
    require_filled(operator, x=x)
    require(x.dim() == 2, operator, f"x {tuple(x.shape)} has not 2 dimensions")
    require_types(operator, FLOAT_TYPES, x=x, weight=weight, residual=residual, bias=bias)
    require_shape(operator, "weight", weight, (x.shape[1],))
    if residual is not None:
        require_shape(operator, "residual", residual, tuple(x.shape))
    if bias is not None:
        require_shape(operator, "bias", bias, (x.shape[1],))


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query (T, H, D), key (T, K, D), cos, sin (T, D) of one type, D 64 or 128: rotated by halves. May write over query and key."""
    operator = "npu_apply_rotary_pos_emb"
    tokens, size = query.shape[0], query.shape[-1]
    require_filled(operator, query=query, key=key)
    require(
        query.dim() == 3 and key.dim() == 3, operator, f"query {tuple(query.shape)}, key {tuple(key.shape)}: layout TND has 3 dimensions"
    )
    require_types(operator, FLOAT_TYPES, query=query, key=key, cos=cos, sin=sin)
    require(size in ROTARY_SIZES, operator, f"head size {size}: it takes {' or '.join(map(str, ROTARY_SIZES))}")
    require_shape(operator, "key", key, (tokens, key.shape[1], size))
    require_shape(operator, "cos", cos, (tokens, size))
    require_shape(operator, "sin", sin, (tokens, size))
    # Documented as in place: it must not be given views, of which it would be given copies.
    rotated: tuple[Tensor, Tensor] = torch.ops.npu.npu_apply_rotary_pos_emb(
        query.contiguous(), key.contiguous(), cos.unsqueeze(1), sin.unsqueeze(1), layout="TND", rotary_mode="half"
    )
    return rotated


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (T, 2 · intermediate), the gate first. Returns (T, intermediate)."""
    operator = "npu_swiglu"
    require_filled(operator, gate_up=gate_up)
    require_types(operator, FLOAT_TYPES, gate_up=gate_up)
    require(gate_up.shape[-1] % 2 == 0, operator, f"gate_up {tuple(gate_up.shape)}: the last size must be even")
    activated: Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
    return activated


def gelu(x: Tensor, cubic: bool) -> Tensor:
    """By the cubic polynomial inside tanh, or by the error function. Not npu_fast_gelu, which is x · sigmoid(1.702 x)."""
    operator = "npu_gelu"
    require_filled(operator, x=x)
    require_types(operator, FLOAT_TYPES, x=x)
    activated: Tensor = torch.ops.npu.npu_gelu(x, approximate="tanh" if cubic else "none")
    return activated


def write_kv_pages(keys: Tensor, values: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """keys, values (T, K, D) into pages (pages, page tokens, K, D), in place; slots (T,) int32 or int64, all different."""
    operator = "npu_scatter_pa_kv_cache"
    require_filled(operator, keys=keys, values=values)
    require(
        keys.dim() == 3 and keys.shape == values.shape, operator, f"keys {tuple(keys.shape)}, values {tuple(values.shape)}: not (T, K, D)"
    )
    require_shape(operator, "slots", slots, (keys.shape[0],))
    require(slots.dtype in (torch.int32, torch.int64), operator, f"slots are {slots.dtype}: it takes int32 or int64")
    for name, new, pages in (("key_pages", keys, key_pages), ("value_pages", values, value_pages)):
        require(pages.dtype == new.dtype, operator, f"{name} are {pages.dtype}, what is written {new.dtype}: the types must be equal")
        require_shape(operator, name, pages, (*pages.shape[:2], *new.shape[1:]))
        require(pages.is_contiguous(), operator, f"{name} are not contiguous: what is written would be lost")
    # Without cache_mode the pages are taken for tiles of FRACTAL_NZ.
    torch.ops.npu.npu_scatter_pa_kv_cache(keys.contiguous(), values.contiguous(), key_pages, value_pages, slots, cache_mode="Norm")


def dynamic_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, n) or (T, K, n) in half precision. Returns int8 in the same shape, and a float32 scale for each row of the last size."""
    operator = "npu_dynamic_quant"
    require_filled(operator, x=x)
    require(x.dim() > 1, operator, f"x {tuple(x.shape)} has fewer than 2 dimensions")
    require_types(operator, HALF_TYPES, x=x)
    quantised: tuple[Tensor, Tensor] = torch.ops.npu.npu_dynamic_quant(x)
    return quantised


def quantised_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`(x · x_scale) @ (weight · scale).T`: x (T, in) int8, x_scale (T,) float32, weight (out, in) int8, scale (out,) float32."""
    operator = "npu_quant_matmul"
    require_filled(operator, x=x, weight=weight)
    require_types(operator, (torch.int8,), x=x, weight=weight)
    require_types(operator, (torch.float32,), x_scale=x_scale, scale=scale)
    require_shape(operator, "weight", weight, (weight.shape[0], x.shape[1]))
    require_shape(operator, "x_scale", x_scale, (x.shape[0],))
    require_shape(operator, "scale", scale, (weight.shape[0],))
    require(max(weight.shape) <= MAX_INNER, operator, f"weight {tuple(weight.shape)}: no size may be beyond {MAX_INNER}")
    require(dtype in HALF_TYPES, operator, f"output {dtype}: it gives float16 or bfloat16")
    # Without output_dtype the answer is int8.
    output: Tensor = torch.ops.npu.npu_quant_matmul(x, weight.t(), scale, pertoken_scale=x_scale, output_dtype=dtype)
    return output


def weight_quantised_matmul(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ (weight · scale).T + bias`: x (T, in) in half precision, weight (out, in) int8, scale (out,), which is rounded to x's type."""
    operator = "npu_weight_quant_batchmatmul"
    require_filled(operator, x=x, weight=weight)
    require_types(operator, HALF_TYPES, x=x)
    require_types(operator, (torch.int8,), weight=weight)
    require_shape(operator, "weight", weight, (weight.shape[0], x.shape[1]))
    require_shape(operator, "scale", scale, (weight.shape[0],))
    require(max(weight.shape) <= MAX_INNER, operator, f"weight {tuple(weight.shape)}: no size may be beyond {MAX_INNER}")
    wide = None
    if bias is not None:
        require_shape(operator, "bias", bias, (weight.shape[0],))
        wide = bias.to(torch.float32 if x.dtype is torch.bfloat16 else torch.float16)
    output: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(x, weight.t(), scale.to(x.dtype), bias=wide)
    return output


def matmul_all_reduce(x: Tensor, weight: Tensor, communicator: str, ranks: int) -> Tensor:
    """The sum over the ranks of `x @ weight.T`: x (T, in), weight (out, in), in half precision. communicator: HCCL's name of the group."""
    operator = "npu_mm_all_reduce_base"
    require_filled(operator, x=x, weight=weight)
    require_types(operator, HALF_TYPES, x=x, weight=weight)
    require_shape(operator, "weight", weight, (weight.shape[0], x.shape[1]))
    require(x.is_contiguous(), operator, "x is transposed: it takes rows end to end")
    require(x.shape[1] <= MAX_INNER, operator, f"x {tuple(x.shape)}: the inner size may not be beyond {MAX_INNER}")
    require(ranks in ALL_REDUCE_RANKS, operator, f"{ranks} ranks: it takes {', '.join(map(str, ALL_REDUCE_RANKS))}")
    require(communicator != "", operator, "the group of ranks has no name: it is not HCCL's")
    output: Tensor = torch.ops.npu.npu_mm_all_reduce_base(x, weight.t(), communicator, reduce_op="sum")
    return output


def filter_top_k_top_p(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """logits (B, V), top_p (B,) of the same float type, top_k (B,) int32 on the host in [1, 1024]: what is left out becomes -inf."""
    operator = "npu_top_k_top_p"
    require_filled(operator, logits=logits)
    require_types(operator, FLOAT_TYPES, logits=logits, top_p=top_p)
    require_types(operator, (torch.int32,), top_k=top_k)
    require_shape(operator, "top_p", top_p, (logits.shape[0],))
    require_shape(operator, "top_k", top_k, (logits.shape[0],))
    largest = min(MAX_TOP_K, logits.shape[1])
    if top_k.device.type == "cpu":
        require(int(top_k.min()) >= 1 and int(top_k.max()) <= largest, operator, f"top_k is not in [1, {largest}]")
    kept: Tensor = torch.ops.npu.npu_top_k_top_p(logits, top_p, top_k.to(logits.device))
    return kept


def to_tiles(weight: Tensor) -> Tensor:
    """A weight (out, in), or a stack of them, in FRACTAL_NZ: same shape, other memory. in and out must fill whole tiles."""
    operator = "npu_format_cast"
    require_filled(operator, weight=weight)
    tile = 32 // weight.element_size()
    require(weight.dtype in (*HALF_TYPES, torch.int8), operator, f"weight is {weight.dtype}: it takes float16, bfloat16 or int8")
    require(
        weight.dim() in (2, 3) and weight.shape[-1] % tile == 0 and weight.shape[-2] % 16 == 0,
        operator,
        f"weight {tuple(weight.shape)}: its last sizes must be multiples of 16 and {tile}",
    )
    tiles: Tensor = torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ)
    return tiles
