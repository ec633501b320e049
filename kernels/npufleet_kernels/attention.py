"""Causal attention over a batch of sequences, each with its own keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

QUERY_BLOCK_TOKENS = 256
"""Queries scored at once: scores take H · 256 · L elements whatever the prompt's length."""


def reference(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

    query: (T, H, D), the sequences' new tokens end to end. keys, values: one (K, L, D) per sequence, whose last
    `query_lengths[i]` positions belong to the new tokens; a token sees itself and what precedes it. H is a multiple of K.
    scale: factor of the scores, usually D ** -0.5. Returns (T, H, D) in query's dtype; the softmax is taken in float32.
    """
    output = torch.empty_like(query)
    start = 0
    for key, value, length in zip(keys, values, query_lengths, strict=True):
        for offset in range(0, length, QUERY_BLOCK_TOKENS):
            count = min(QUERY_BLOCK_TOKENS, length - offset)
            visible = key.shape[1] - length + offset + count
            rows = slice(start + offset, start + offset + count)
            output[rows] = _attend(query[rows], key[:, :visible], value[:, :visible], scale)
        start += length
    return output


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of the last `n` positions of one sequence. query: (n, H, D); key, value: (K, L, D)."""
    count, heads, size = query.shape
    kv_heads, length, _ = key.shape
    group = heads // kv_heads
    grouped = query.view(count, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * count, size)
    scores = torch.matmul(grouped, key.transpose(1, 2)).to(torch.float32) * scale
    if count > 1:
        hidden = torch.ones(count, length, dtype=torch.bool, device=query.device).triu(length - count + 1)
        scores = scores.view(kv_heads, group, count, length).masked_fill(hidden, float("-inf")).view(kv_heads, group * count, length)
    mixed = torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), value)
    return mixed.view(kv_heads, group, count, size).permute(2, 0, 1, 3).reshape(count, heads, size)
