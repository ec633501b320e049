"""CPU implementations of NPU operators, with the constraints that their documentation states, so that NPU code runs numerically.

Written after the documentation in torch_npu's docstrings, not after npufleet's wrapper: what one of the two forgets, the other may hold.
Sums are taken in float32, as the operators do. Inference only. `register` is called once torch_npu is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ascendenv.errors import SimulationError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

_libraries: list[torch.library.Library] = []
"""A Library takes its implementations with it when it is collected."""


def need(condition: bool, message: str) -> None:
    """Raise SimulationError unless `condition` holds."""
    if not condition:
        raise SimulationError(message)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    need(x.dtype is gamma.dtype and x.dtype in (BF16, F16, F32), f"rms_norm: {x.dtype} with gamma {gamma.dtype}")
    need(2 <= x.dim() <= 8 and x.shape[-gamma.dim() :] == gamma.shape, f"rms_norm: gamma {tuple(gamma.shape)} for {tuple(x.shape)}")
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    need(x1.shape == x2.shape and x1.dtype is x2.dtype, f"add_rms_norm: {tuple(x1.shape)} {x1.dtype} and {tuple(x2.shape)} {x2.dtype}")
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


def layer_norm_eval(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    wide = [None if part is None else part.float() for part in (weight, bias)]
    return torch.nn.functional.layer_norm(x.float(), list(normalized_shape), wide[0], wide[1], eps).to(x.dtype)


def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need(x1.shape == x2.shape and gamma.shape == beta.shape == x1.shape[-1:], f"add_layer_norm: {tuple(x1.shape)} and {tuple(x2.shape)}")
    total = x1.float() + x2.float()
    mean = total.mean(-1, keepdim=True)
    scale = torch.rsqrt((total - mean).pow(2).mean(-1, keepdim=True) + epsilon)
    normed = ((total - mean) * scale * gamma.float() + beta.float()).to(x1.dtype)
    return normed, mean, scale, total.to(x1.dtype) if additional_output else x1.new_empty(0)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    need(x.size(dim) % 2 == 0, f"swiglu: size {x.size(dim)} is odd")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype)


def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    need(layout == "TND" and query.dim() == 3 and rotary_mode == "half", f"rotary: {layout}, {query.dim()} dimensions, {rotary_mode}")
    need(query.numel() > 0 and query.size(-1) in (64, 128), f"rotary: query {tuple(query.shape)}")
    need(len({part.dtype for part in (query, key, cos, sin)}) == 1, "rotary: types differ")
    need(cos.shape == sin.shape == (query.size(0), 1, query.size(-1)), f"rotary: cos {tuple(cos.shape)} for {tuple(query.shape)}")

    def turn(part: Tensor) -> Tensor:
        first, second = part.float().chunk(2, -1)
        return (part.float() * cos.float() + torch.cat((-second, first), -1) * sin.float()).to(part.dtype)

    # Documented as in place.
    return query.copy_(turn(query)).clone(), key.copy_(turn(key)).clone()


def scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *, cache_mode: str | None = "PA_NZ"
) -> None:
    need(cache_mode in (None, "Norm"), f"scatter: cache_mode {cache_mode} with pages in ND")
    need(slots.dtype in (torch.int32, torch.int64) and slots.shape == key.shape[:1], f"scatter: slots {slots.dtype} {tuple(slots.shape)}")
    need(len(set(slots.tolist())) == slots.numel(), "scatter: a slot occurs twice")
    for new, cache in ((key, key_cache), (value, value_cache)):
        need(
            cache.dim() == 4 and cache.shape[2:] == new.shape[1:] and cache.dtype is new.dtype,
            f"scatter: {tuple(new.shape)} to {tuple(cache.shape)}",
        )
        need(int(slots.min()) >= 0 and int(slots.max()) < cache.size(0) * cache.size(1), "scatter: a slot beyond the cache")
        cache.view(-1, *cache.shape[2:])[slots.long()] = new


def dynamic_quant(x: Tensor, *, smooth_scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    need(x.dim() > 1 and x.dtype in (BF16, F16) and smooth_scales is None, f"dynamic_quant: {tuple(x.shape)} {x.dtype}")
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / torch.where(scale > 0, scale, 1.0)).round().to(torch.int8), scale.squeeze(-1)


def quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, *, pertoken_scale: Tensor, output_dtype: Any) -> Tensor:
    # Neither may be left out here, whatever the schema says: without output_dtype the answer is int8.
    need(x1.dtype is torch.int8 and x2.dtype is torch.int8, f"quant_matmul: {x1.dtype} with {x2.dtype}")
    need(
        x1.size(-1) == x2.size(0) and scale.shape == x2.shape[1:],
        f"quant_matmul: {tuple(x1.shape)}, {tuple(x2.shape)}, {tuple(scale.shape)}",
    )
    # Exact: sums of up to 2^17 products of bytes fit float64.
    total = torch.matmul(x1.double(), x2.double()).float() * scale.float()
    return (total * pertoken_scale.unsqueeze(-1)).to(_dtype(output_dtype))


def _dtype(given: Any) -> torch.dtype:
    """torch's own, or ATen's number of it, as which a schema of an int passes it on."""
    if isinstance(given, torch.dtype):
        return given
    return {1: torch.int8, 5: F16, 15: BF16, 3: torch.int32}[int(given)]


def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    need(x.dtype in (BF16, F16) and weight.dtype is torch.int8, f"weight_quant: {x.dtype} with {weight.dtype}")
    need(antiquant_scale.dtype is x.dtype and antiquant_scale.shape == weight.shape[1:], f"weight_quant: scale {antiquant_scale.dtype}")
    need(antiquant_offset is None and quant_scale is None and quant_offset is None, "weight_quant: offsets are not computed here")
    need(bias is None or bias.dtype is (F32 if x.dtype is BF16 else F16), "weight_quant: the bias's type")
    total = torch.matmul(x.float(), weight.float()) * antiquant_scale.float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


def mm_all_reduce_base(x1: Tensor, x2: Tensor, hcom: str, *, reduce_op: str = "sum") -> Tensor:
    need(reduce_op == "sum" and hcom != "", f"mm_all_reduce: {reduce_op}, group {hcom!r}")
    need(
        x1.dtype is x2.dtype and x1.dtype in (BF16, F16) and x1.size(-1) == x2.size(0),
        f"mm_all_reduce: {tuple(x1.shape)} {tuple(x2.shape)}",
    )
    product = torch.matmul(x1.float(), x2.float()).to(x1.dtype)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(product)
    return product


def top_k_top_p(logits: Tensor, p: Tensor, k: Tensor) -> Tensor:
    need(p.dtype is logits.dtype and k.dtype is torch.int32, "top_k_top_p: types of p and k")
    need(bool((k >= 1).all()) and bool((k <= min(1024, logits.size(1))).all()), "top_k_top_p: k is not in [1, 1024]")
    values, order = logits.float().sort(dim=-1, descending=False, stable=True)
    limit = values.gather(1, logits.size(1) - k.long().unsqueeze(1))
    values = values.masked_fill(values < limit, float("-inf"))
    out = values.softmax(-1).cumsum(-1) <= 1 - p.float().unsqueeze(1)
    out[:, -1] = False
    kept = values.masked_fill(out, float("-inf"))
    return torch.empty_like(kept).scatter_(1, order, kept).to(logits.dtype)


def format_cast(x: Tensor, acl_format: int) -> Tensor:
    # Host memory knows no tiles.
    return x.clone()


def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    block_table: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    need(not others, f"attention: {', '.join(others)} are not computed here")
    kv_heads = num_key_value_heads or num_query_heads
    heads, size = query.shape[-2:]
    need(heads == num_query_heads and heads % kv_heads == 0 and heads // kv_heads <= 64, f"attention: {heads} heads, {kv_heads} KV heads")
    need(sparse_mode in (0, 3), f"attention: sparse_mode {sparse_mode}")
    need((sparse_mode == 3) == (atten_mask is not None), "attention: sparse_mode 3 takes a mask, 0 none")
    if atten_mask is not None:
        need(tuple(atten_mask.shape) == (2048, 2048), f"attention: mask {tuple(atten_mask.shape)}")
        need(atten_mask.dtype in (torch.bool, torch.int8, torch.uint8), f"attention: mask {atten_mask.dtype}")
        need(bool((atten_mask == torch.ones_like(atten_mask).triu(1)).all()), "attention: the mask is no triangle")
    if input_layout == "TND":
        need(query.dtype is BF16 and (size == 128 or size == 192), f"attention: TND with {query.dtype}, head size {size}")
        need(len(actual_seq_qlen) <= 4096 and query.size(0) <= 1 << 20, "attention: TND with too many sequences or tokens")
        new = _steps(actual_seq_qlen, query.size(0))
        rows = list(torch.split(query, new))
    else:
        need(input_layout == "BSND" and query.dim() == 4, f"attention: {input_layout} is not computed here")
        need(query.dtype in (BF16, F16) and size % 16 == 0 and size <= 512, f"attention: BSND with {query.dtype}, head size {size}")
        need(query.size(1) == 1 or heads * size < 65535, "attention: BSND with too many heads")
        new = [query.size(1)] * query.size(0)
        rows = list(query)
    several = max(new) > 1
    stored, tokens = _stored(
        key, value, block_table, actual_seq_kvlen, len(rows), kv_heads, size, block_size, dequant_scale_key is not None, several
    )
    need(several <= (sparse_mode == 3) or block_table is None, "attention: several new tokens without a mask see what follows them")
    outputs = []
    for index, (one, (keys, values)) in enumerate(zip(rows, stored, strict=True)):
        wide = [keys.float(), values.float()]
        if dequant_scale_key is not None and dequant_scale_value is not None:
            need(
                key_quant_mode == value_quant_mode == 3 and not several,
                "attention: INT8 keys with a scale per token and head, one new token",
            )
            for side, scales in enumerate((dequant_scale_key, dequant_scale_value)):
                need(scales.dtype is F32 and scales.shape[:2] == (len(rows), kv_heads), f"attention: scales {tuple(scales.shape)}")
                wide[side] = wide[side] * scales[index, :, : tokens[index]].t().unsqueeze(-1)
        outputs.append(_mix(one, wide[0], wide[1], softmax_scale, sparse_mode == 3))
    mixed = torch.cat(outputs) if input_layout == "TND" else torch.stack(outputs)
    return mixed, torch.empty(0)


def _steps(ends: Sequence[int], total: int) -> list[int]:
    steps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    need(min(steps) >= 0 and ends[-1] == total, f"attention: lengths {list(ends)} are not cumulative up to {total}")
    return steps


def _stored(
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    lengths: Sequence[int],
    sequences: int,
    kv_heads: int,
    size: int,
    block: int,
    int8: bool,
    several: bool,
) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
    """Keys and values, each (L, K, D), and L of every sequence."""
    need(key.shape == value.shape and key.dtype is value.dtype, "attention: keys and values differ")
    need((key.dtype is torch.int8) == int8, f"attention: keys {key.dtype} with scales: {int8}")
    need(key.is_contiguous() and value.is_contiguous(), "attention: keys or values are not contiguous")
    if table is None:
        need(key.dim() == 3 and key.shape[1:] == (kv_heads, size), f"attention: keys {tuple(key.shape)}")
        tokens = _steps(lengths, key.size(0))
        return list(zip(torch.split(key, tokens), torch.split(value, tokens), strict=True)), tokens
    tokens = list(lengths)
    need(table.dtype is torch.int32 and table.dim() == 2, f"attention: table {table.dtype}")
    need(table.size(0) == len(tokens) == sequences, f"attention: {table.size(0)} rows, {len(tokens)} lengths, {sequences} sequences")
    step = 128 if several else 32 if int8 else 16
    need(0 < block <= 512 and block % step == 0, f"attention: pages of {block} tokens")
    need(key.dim() == 3 and key.shape[1:] == (block, kv_heads * size), f"attention: pages {tuple(key.shape)}")
    need(kv_heads * size <= 65535, "attention: keys of a token are too large")

    def rows(pages: Tensor, index: int) -> Tensor:
        used = -(-tokens[index] // block)
        need(used <= table.size(1), f"attention: {tokens[index]} tokens in {table.size(1)} pages")
        return pages[table[index, :used].long()].reshape(-1, kv_heads, size)[: tokens[index]]

    return [(rows(key, index), rows(value, index)) for index in range(sequences)], tokens


def _mix(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Tensor:
    """query (n, H, D); keys, values (L, K, D) float32. Returns (n, H, D)."""
    group = query.size(1) // keys.size(1)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if causal:
        need(keys.size(0) >= query.size(0), f"attention: {query.size(0)} new of {keys.size(0)} tokens")
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(keys.size(0) - query.size(0) + 1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_layer_norm_eval": layer_norm_eval,
    "npu_add_layer_norm": add_layer_norm,
    "npu_swiglu": swiglu,
    "npu_gelu": gelu,
    "npu_apply_rotary_pos_emb": apply_rotary_pos_emb,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_dynamic_quant": dynamic_quant,
    "npu_quant_matmul": quant_matmul,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul,
    "npu_mm_all_reduce_base": mm_all_reduce_base,
    "npu_top_k_top_p": top_k_top_p,
    "npu_format_cast": format_cast,
    "npu_fused_infer_attention_score_v2": fused_infer_attention_score_v2,
}


def register() -> None:
    """Give torch_npu's operators these implementations for tensors of the CPU, once; and the meta function that one of them lacks."""
    if _libraries:
        return
    on_cpu = torch.library.Library("npu", "IMPL", "CPU")
    for name, implementation in IMPLEMENTATIONS.items():
        on_cpu.impl(name, implementation)
    on_meta = torch.library.Library("npu", "IMPL", "Meta")
    on_meta.impl("npu_format_cast", lambda x, acl_format: torch.empty_like(x))
    _libraries.extend((on_cpu, on_meta))
