"""The strategies of `attention` through the operator behind torch's scaled_dot_product_attention for CPUs.

It is blocked over queries and keys itself, and keeps no scores. What tells the strategies apart is how often it is called for a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npufleet_kernels import attention
from npufleet_kernels.attention import by_query_block, group_heads, ungroup_heads


def full(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """One call. Where earlier tokens stand before several new ones it takes a mask of n · L elements."""
    return by_query_block(_masked, query, keys, values, query_lengths, scale, causal, max(query_lengths, default=1))


def two_phase(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """For each block of queries two calls without a mask: what stands before the block, and the block itself."""
    return by_query_block(_joined, query, keys, values, query_lengths, scale, causal, attention.QUERY_BLOCK_TOKENS)


def blocked(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """Two calls without a mask for all new tokens: earlier ones, which all of them see, and the new ones; the operator makes the blocks."""
    return by_query_block(_joined, query, keys, values, query_lengths, scale, causal, max(query_lengths, default=1))


def _masked(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    count, earlier = query.shape[0], key.shape[1] - query.shape[0]
    if count == 1:
        return _one_token(query, key, value, scale)
    mask = None
    if causal and earlier:
        mask = torch.full((count, key.shape[1]), float("-inf"), dtype=query.dtype, device=query.device).triu_(earlier + 1)
    return _flash(query.transpose(0, 1), key, value, scale, causal and not earlier, mask)[0].transpose(0, 1)


def _joined(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    count, earlier = query.shape[0], key.shape[1] - query.shape[0]
    if count == 1:
        return _one_token(query, key, value, scale)
    heads = query.transpose(0, 1)
    if not causal or earlier == 0:
        return _flash(heads, key, value, scale, causal)[0].transpose(0, 1)
    before, before_sums = _flash(heads, key[:, :earlier], value[:, :earlier], scale, False)
    among, among_sums = _flash(heads, key[:, earlier:], value[:, earlier:], scale, True)
    share = torch.sigmoid(before_sums - among_sums).unsqueeze(-1)
    return torch.lerp(among, before, share.to(among.dtype)).transpose(0, 1)


def _one_token(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    # The heads of a group are the rows of one product, so that keys and values are read once per group.
    mixed, _ = _flash(group_heads(query, key.shape[0]), key, value, scale, False)
    return ungroup_heads(mixed, 1)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(attention (H, n, D), logarithm of each query's sum of exponentiated scores (H, n), float32). query (H, n, D); key, value (K, L, D).

    causal: query i sees the first i + 1 keys. mask: (n, L), added to the scores.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attn_mask = None if mask is None else mask[None, None]
    mixed, sums = flash(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, causal, attn_mask=attn_mask, scale=scale)
    return mixed[0], sums[0]
