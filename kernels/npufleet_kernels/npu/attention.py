"""Attention by one operator for all strategies, since it is blocked itself. Which layout, and what it cannot take, is decided here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npufleet_kernels import attention, attention_int8
from npufleet_kernels.errors import UnsupportedCallError
from npufleet_kernels.npu import fused_attention
from npufleet_kernels.npu.routes import take_other
from npufleet_kernels.paged_rows import PagedRows


def attend(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """See `attention.full`.

    From pages: layout TND, where it takes the head size and type; else BSND, one call for the single tokens and one for each prompt.
    Otherwise, and for what neither takes, the reference in blocks.
    """
    try:
        if isinstance(keys, PagedRows) and isinstance(values, PagedRows) and causal:
            return _attend_paged(query, keys, values, query_lengths, scale)
        return _attend_dense(query, keys, values, query_lengths, scale, causal)
    except UnsupportedCallError as error:
        take_other("attention", "reference, in blocks", error)
        return attention.blocked(query, keys, values, query_lengths, scale, causal)


def _attend_dense(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool
) -> Tensor:
    lengths = [key.shape[1] for key in keys]
    joined_keys, joined_values = (torch.cat([one.transpose(0, 1) for one in side]) for side in (keys, values))
    return fused_attention.dense_tnd(query, joined_keys, joined_values, query_lengths, lengths, scale, causal)


def _attend_paged(query: Tensor, keys: PagedRows, values: PagedRows, query_lengths: Sequence[int], scale: float) -> Tensor:
    try:
        return fused_attention.paged_tnd(query, keys.pages, values.pages, keys.table, query_lengths, keys.lengths, scale)
    except UnsupportedCallError as error:
        mixed = _attend_by_sequence(query, keys, values, query_lengths, scale)
        take_other("attention", "layout BSND, prompts one by one", error)
        return mixed


def _attend_by_sequence(query: Tensor, keys: PagedRows, values: PagedRows, query_lengths: Sequence[int], scale: float) -> Tensor:
    """Runs of sequences with one new token by one call each, other sequences alone."""
    mixed, row, first = [], 0, 0
    while first < len(query_lengths):
        count = query_lengths[first]
        last = first + 1
        while count == 1 and last < len(query_lengths) and query_lengths[last] == 1:
            last += 1
        part = slice(first, last)
        new = query[row : row + count * (last - first)]
        found = fused_attention.paged_bsnd(
            new.view(last - first, count, *new.shape[1:]), keys.pages, values.pages, keys.table[part], keys.lengths[part], scale
        )
        mixed.append(found.flatten(0, 1))
        row, first = row + new.shape[0], last
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def attend_int8(
    query: Tensor,
    keys: Sequence[Tensor],
    key_scales: Sequence[Tensor],
    values: Sequence[Tensor],
    value_scales: Sequence[Tensor],
    query_lengths: Sequence[int],
    scale: float,
    causal: bool = True,
) -> Tensor:
    """See `attention_int8.reference`. A step of single tokens goes through the operator, others are widened block by block."""
    try:
        if (
            isinstance(keys, PagedRows)
            and isinstance(values, PagedRows)
            and isinstance(key_scales, PagedRows)
            and isinstance(value_scales, PagedRows)
        ):
            return _decode_int8(query, keys, key_scales, values, value_scales, query_lengths, scale)
        raise UnsupportedCallError(f"{fused_attention.OPERATOR}: INT8 keys and values are not in pages")
    except UnsupportedCallError as error:
        take_other("attention_int8", "in blocks", error)
        return attention_int8.blocked(query, keys, key_scales, values, value_scales, query_lengths, scale, causal)


def _decode_int8(
    query: Tensor,
    keys: PagedRows,
    key_scales: PagedRows,
    values: PagedRows,
    value_scales: PagedRows,
    query_lengths: Sequence[int],
    scale: float,
) -> Tensor:
    if any(count != 1 for count in query_lengths):
        raise UnsupportedCallError(f"{fused_attention.OPERATOR}: INT8 keys in pages take one new token for each sequence")
    scales = [_by_sequence(side) for side in (key_scales, value_scales)]
    return fused_attention.paged_int8_decode(query, keys.pages, scales[0], values.pages, scales[1], keys.table, keys.lengths, scale)


def _by_sequence(scales: PagedRows) -> Tensor:
    """(B, K, tokens of the table's pages): with a scale per token and head the operator follows the table for keys alone."""
    pages = scales.pages.index_select(0, scales.table.flatten())
    return pages.view(scales.table.shape[0], -1, scales.pages.shape[2]).transpose(1, 2)
