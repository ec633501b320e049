"""Attention over keys and values that are stored as INT8 with a scale per token and head.

Every variant has the signature and the meaning of `reference`. Scores are products with the stored integers, multiplied by the key's
scale; values are mixed as integers too, each weight multiplied by the value's scale before: so only a block is ever widened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npufleet_kernels import attention
from npufleet_kernels.attention import group_heads, hide_following, key_blocks, query_blocks, running_softmax, ungroup_heads


def reference(
    query: Tensor,
    keys: Sequence[Tensor],
    key_scales: Sequence[Tensor],
    values: Sequence[Tensor],
    value_scales: Sequence[Tensor],
    query_lengths: Sequence[int],
    scale: float,
    causal: bool = True,
) -> Tensor:
    """`attention.two_phase` over `int8.dequantise` of keys and values, computed in float32.

    query: (T, H, D), any float dtype, the sequences' new tokens end to end. keys, values: one (K, L, D) int8 per sequence, key_scales,
    value_scales: one (K, L) float32 each, all of any strides; the last `query_lengths[i]` positions belong to the new tokens. H is a
    multiple of K. Returns (T, H, D) in query's dtype.

    Against float keys and values: a score is wrong by at most e = scale · key_scale / 2 · Σ|query|, so a weight by a factor between
    exp(−2e) and exp(2e), and an output by at most value_scale / 2 + (exp(2e) − 1) · max|value|, with the largest scales, besides rounding.
    """
    return _by_query_block(_attend, query, keys, key_scales, values, value_scales, query_lengths, scale, causal)


def blocked(
    query: Tensor,
    keys: Sequence[Tensor],
    key_scales: Sequence[Tensor],
    values: Sequence[Tensor],
    value_scales: Sequence[Tensor],
    query_lengths: Sequence[int],
    scale: float,
    causal: bool = True,
) -> Tensor:
    """`reference` with a running softmax, as `attention.blocked`: its scratch memory is the same for every length."""
    return _by_query_block(_attend_blocked, query, keys, key_scales, values, value_scales, query_lengths, scale, causal)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], Tensor]


def _by_query_block(
    attend: Attend,
    query: Tensor,
    keys: Sequence[Tensor],
    key_scales: Sequence[Tensor],
    values: Sequence[Tensor],
    value_scales: Sequence[Tensor],
    query_lengths: Sequence[int],
    scale: float,
    causal: bool,
) -> Tensor:
    output = torch.empty_like(query)
    stored = zip(keys, key_scales, values, value_scales, strict=True)
    for rows, (key, key_scale, value, value_scale) in query_blocks(stored, query_lengths, causal, attention.QUERY_BLOCK_TOKENS):
        output[rows] = attend(query[rows].to(torch.float32), key, key_scale, value, value_scale, scale, causal)
    return output


def _attend(query: Tensor, key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention of the last `n` positions of one sequence. query: (n, H, D) float32; key, value: (K, L, D); scales: (K, L)."""
    count, length = query.shape[0], key.shape[1]
    grouped = group_heads(query, key.shape[0])
    scores = torch.empty((*grouped.shape[:2], length), dtype=torch.float32, device=query.device)
    for part in key_blocks(length):
        scores[..., part] = _scores(grouped, key[:, part], key_scale[:, part], scale)
    if causal and count > 1:
        hide_following(scores, count, length, 0)
    weights = torch.softmax(scores, dim=-1)
    mixed = torch.zeros_like(grouped)
    for part in key_blocks(length):
        mixed += _mix(weights[..., part], value[:, part], value_scale[:, part])
    return ungroup_heads(mixed, count)


def _attend_blocked(
    query: Tensor, key: Tensor, key_scale: Tensor, value: Tensor, value_scale: Tensor, scale: float, causal: bool
) -> Tensor:
    """As `_attend`, one block of keys after the other."""
    count, length = query.shape[0], key.shape[1]
    grouped = group_heads(query, key.shape[0])

    def score(part: slice) -> Tensor:
        return _scores(grouped, key[:, part], key_scale[:, part], scale)

    def mix(weights: Tensor, part: slice) -> Tensor:
        return _mix(weights, value[:, part], value_scale[:, part])

    return ungroup_heads(running_softmax(grouped, count, length, causal, score, mix), count)


def _scores(grouped: Tensor, key: Tensor, key_scale: Tensor, scale: float) -> Tensor:
    return torch.matmul(grouped, key.to(torch.float32).transpose(1, 2)).mul_(key_scale.unsqueeze(1) * scale)


def _mix(weights: Tensor, value: Tensor, value_scale: Tensor) -> Tensor:
    return torch.matmul(weights * value_scale.unsqueeze(1), value.to(torch.float32))
