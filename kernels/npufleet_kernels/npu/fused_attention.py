"""npu_fused_infer_attention_score_v2, in the layouts that are used here, with its documented constraints.

The second version, since it is the one whose documentation (torch_npu 2.13.0) lets layout TND have block tables at a head size of 128 and
groups of heads. Each function raises UnsupportedCallError before the call where a constraint does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from npufleet_kernels.errors import UnsupportedCallError
from npufleet_kernels.npu.constraints import HALF_TYPES, require, require_filled, require_shape, require_types

OPERATOR = "npu_fused_infer_attention_score_v2"
CAUSAL = 3
"""sparse_mode in which the last query sees the last key, and the mask is a triangle of fixed size."""
NO_MASK = 0
MASK_SIZE = 2048
TOKEN_AND_HEAD = 3
"""key_quant_mode of a scale per token and head."""

TND_HEAD_SIZES = (128, 192)
"""64 is not listed."""
TND_MAX_TOKENS = 1 << 20
TND_MAX_SEQUENCES = 4096
MAX_SEQUENCES = 65536
MAX_HEAD_SIZE = 512
MAX_HEADS = 256
MAX_GROUP = 64
MAX_ROW = 65535
"""Elements of a token's keys, and, with several queries per sequence, of its queries too."""
MAX_PAGE_TOKENS = 512
PAGE_STEP = 128
DECODE_PAGE_STEP = 16
INT8_PAGE_STEP = 32
MAX_CACHE_ELEMENTS = 2**31 - 1


@lru_cache(maxsize=8)
def causal_mask(device: torch.device) -> Tensor:
    """(2048, 2048) int8, 1 above the diagonal, whatever the lengths: one for a device."""
    return torch.ones((MASK_SIZE, MASK_SIZE), dtype=torch.int8, device=device).triu(1)


def paged_tnd(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    table: Tensor,
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Causal attention of all sequences, prompts and single tokens mixed.

    query (T, H, D) bfloat16, D 128 or 192; pages (pages, page tokens, K, D); table (B, most pages) int32; query_lengths add up to T,
    lengths are of the whole sequences. Returns (T, H, D).
    """
    _check_tnd(query, key_pages, query_lengths, lengths)
    _check_pages(query, key_pages, value_pages, table, lengths, PAGE_STEP)
    return _attend(
        query,
        key_pages.flatten(2),
        value_pages.flatten(2),
        layout="TND",
        kv_heads=key_pages.shape[2],
        scale=scale,
        query_lengths=list(accumulate(query_lengths)),
        # By sequence, not cumulative, since there is a table.
        lengths=list(lengths),
        table=table,
        page_tokens=key_pages.shape[1],
        mask=causal_mask(query.device),
    )


def dense_tnd(
    query: Tensor, keys: Tensor, values: Tensor, query_lengths: Sequence[int], lengths: Sequence[int], scale: float, causal: bool
) -> Tensor:
    """Attention over keys and values (S, K, D) that lie end to end, `lengths` adding up to S. query, and what returns: (T, H, D)."""
    _check_tnd(query, keys, query_lengths, lengths, causal)
    require_types(OPERATOR, (torch.bfloat16,), query=query, keys=keys, values=values)
    require(keys.shape == values.shape, OPERATOR, f"keys {tuple(keys.shape)}, values {tuple(values.shape)}: the shapes must be equal")
    require(sum(lengths) == keys.shape[0], OPERATOR, f"lengths add up to {sum(lengths)}, there are {keys.shape[0]} keys")
    return _attend(
        query,
        keys.contiguous(),
        values.contiguous(),
        layout="TND",
        kv_heads=keys.shape[1],
        scale=scale,
        query_lengths=list(accumulate(query_lengths)),
        lengths=list(accumulate(lengths)),
        mask=causal_mask(query.device) if causal else None,
    )


def paged_bsnd(query: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention of sequences with equally many new tokens: query, and what returns, (B, n, H, D) in half precision."""
    sequences, count, heads, size = query.shape
    require_filled(OPERATOR, query=query)
    require(sequences <= MAX_SEQUENCES, OPERATOR, f"{sequences} sequences: layout BSND takes up to {MAX_SEQUENCES}")
    _check_heads(heads, key_pages.shape[2], size)
    require(count == 1 or heads * size < MAX_ROW, OPERATOR, f"{heads} heads of {size}: together they must be below {MAX_ROW}")
    require(all(length >= count for length in lengths), OPERATOR, f"a sequence of {min(lengths)} tokens has not {count} new ones")
    _check_pages(query, key_pages, value_pages, table, lengths, DECODE_PAGE_STEP if count == 1 else PAGE_STEP)
    return _attend(
        query,
        key_pages.flatten(2),
        value_pages.flatten(2),
        layout="BSND",
        kv_heads=key_pages.shape[2],
        scale=scale,
        query_lengths=[count] * sequences,
        lengths=list(lengths),
        table=table,
        page_tokens=key_pages.shape[1],
        mask=None if count == 1 else causal_mask(query.device),
    )


def paged_int8_decode(
    query: Tensor,
    key_pages: Tensor,
    key_scales: Tensor,
    value_pages: Tensor,
    value_scales: Tensor,
    table: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Attention of one new token for each sequence over INT8 keys and values.

    query (B, H, D) in half precision, D a multiple of 32; pages (pages, page tokens, K, D) int8; scales (B, K, S) float32, S at least what
    the table's pages hold. Returns (B, H, D).
    """
    sequences, heads, size = query.shape
    kv_heads, page_tokens = key_pages.shape[2], key_pages.shape[1]
    require_filled(OPERATOR, query=query)
    require(sequences <= MAX_SEQUENCES, OPERATOR, f"{sequences} sequences: layout BSND takes up to {MAX_SEQUENCES}")
    require_types(OPERATOR, HALF_TYPES, query=query)
    _check_heads(heads, kv_heads, size)
    require(size % 32 == 0, OPERATOR, f"head size {size}: INT8 keys take multiples of 32")
    _check_table(key_pages, value_pages, table, lengths, sequences, INT8_PAGE_STEP)
    require_types(OPERATOR, (torch.int8,), key_pages=key_pages, value_pages=value_pages)
    require_types(OPERATOR, (torch.float32,), key_scales=key_scales, value_scales=value_scales)
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        require_shape(OPERATOR, name, scales, (sequences, kv_heads, scales.shape[2]))
        held = table.shape[1] * page_tokens
        require(scales.shape[2] >= held, OPERATOR, f"{name} are of {scales.shape[2]} tokens, the table's pages hold {held}")
    mixed = _attend(
        query.unsqueeze(1),
        key_pages.flatten(2),
        value_pages.flatten(2),
        layout="BSND",
        kv_heads=kv_heads,
        scale=scale,
        query_lengths=[1] * sequences,
        lengths=list(lengths),
        table=table,
        page_tokens=page_tokens,
        key_scales=key_scales.contiguous(),
        value_scales=value_scales.contiguous(),
    )
    return mixed.squeeze(1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    layout: str,
    kv_heads: int,
    scale: float,
    query_lengths: list[int],
    lengths: list[int],
    table: Tensor | None = None,
    page_tokens: int = 0,
    mask: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    mixed: Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(
        query.contiguous(),
        keys,
        values,
        atten_mask=mask,
        actual_seq_qlen=query_lengths,
        actual_seq_kvlen=lengths,
        block_table=table,
        dequant_scale_key=key_scales,
        dequant_scale_value=value_scales,
        num_query_heads=query.shape[-2],
        num_key_value_heads=kv_heads,
        softmax_scale=scale,
        input_layout=layout,
        sparse_mode=NO_MASK if mask is None else CAUSAL,
        block_size=page_tokens,
        key_quant_mode=0 if key_scales is None else TOKEN_AND_HEAD,
        value_quant_mode=0 if value_scales is None else TOKEN_AND_HEAD,
    )[0]
    return mixed


def _check_tnd(query: Tensor, keys: Tensor, query_lengths: Sequence[int], lengths: Sequence[int], causal: bool = True) -> None:
    tokens, heads, size = query.shape
    require_filled(OPERATOR, query=query)
    require_types(OPERATOR, (torch.bfloat16,), query=query)
    _check_heads(heads, keys.shape[-2], size)
    require(size in TND_HEAD_SIZES, OPERATOR, f"head size {size}: layout TND takes {' or '.join(map(str, TND_HEAD_SIZES))}")
    require(tokens <= TND_MAX_TOKENS, OPERATOR, f"{tokens} new tokens: layout TND takes up to {TND_MAX_TOKENS}")
    require(len(lengths) <= TND_MAX_SEQUENCES, OPERATOR, f"{len(lengths)} sequences: layout TND takes up to {TND_MAX_SEQUENCES}")
    require(len(query_lengths) == len(lengths), OPERATOR, f"{len(query_lengths)} query lengths for {len(lengths)} sequences")
    if min(query_lengths) < 1:
        raise UnsupportedCallError(f"{OPERATOR}: query lengths {list(query_lengths)}: each sequence has a new token")
    require(sum(query_lengths) == tokens, OPERATOR, f"query lengths add up to {sum(query_lengths)}, there are {tokens} queries")
    require(
        not causal or all(new <= length for new, length in zip(query_lengths, lengths, strict=True)),
        OPERATOR,
        "a sequence has more new tokens than tokens",
    )


def _check_heads(heads: int, kv_heads: int, size: int) -> None:
    require(heads % kv_heads == 0, OPERATOR, f"{heads} heads are no multiple of {kv_heads} KV heads")
    require(heads // kv_heads <= MAX_GROUP, OPERATOR, f"{heads // kv_heads} heads for a KV head: it takes up to {MAX_GROUP}")
    require(heads <= MAX_HEADS, OPERATOR, f"{heads} heads: it takes up to {MAX_HEADS}")
    require(size % 16 == 0 and size <= MAX_HEAD_SIZE, OPERATOR, f"head size {size}: it takes multiples of 16 up to {MAX_HEAD_SIZE}")


def _check_pages(query: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Sequence[int], step: int) -> None:
    require_types(OPERATOR, HALF_TYPES, query=query, key_pages=key_pages, value_pages=value_pages)
    _check_table(key_pages, value_pages, table, lengths, len(lengths), step)
    require(key_pages.shape[-1] == query.shape[-1], OPERATOR, f"keys of size {key_pages.shape[-1]} for queries of {query.shape[-1]}")


def _check_table(key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Sequence[int], sequences: int, step: int) -> None:
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        require(
            pages.dim() == 4 and pages.is_contiguous(), OPERATOR, f"{name} {tuple(pages.shape)} are not (pages, tokens, K, D) end to end"
        )
        require(pages.numel() <= MAX_CACHE_ELEMENTS, OPERATOR, f"{name} {tuple(pages.shape)}: more elements than {MAX_CACHE_ELEMENTS}")
    require_shape(OPERATOR, "value_pages", value_pages, tuple(key_pages.shape))
    tokens, row = key_pages.shape[1], key_pages.shape[2] * key_pages.shape[3]
    require(tokens % step == 0 and tokens <= MAX_PAGE_TOKENS, OPERATOR, f"pages of {tokens} tokens: it takes multiples of {step} up to 512")
    require(row <= MAX_ROW, OPERATOR, f"{row} elements of keys for a token: it takes up to {MAX_ROW}")
    require(
        table.dtype is torch.int32 and table.dim() == 2, OPERATOR, f"table {table.dtype} {tuple(table.shape)}: it takes int32 (B, pages)"
    )
    require(
        len(lengths) == sequences == table.shape[0],
        OPERATOR,
        f"{table.shape[0]} rows of the table, {len(lengths)} lengths, {sequences} sequences",
    )
    pages_needed = -(-max(lengths) // tokens)
    require(pages_needed <= table.shape[1], OPERATOR, f"{max(lengths)} tokens need {pages_needed} pages, the table has {table.shape[1]}")
