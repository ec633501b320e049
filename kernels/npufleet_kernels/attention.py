"""Attention over a batch of sequences, each with its own keys and values, by three strategies.

All have the signature and the meaning of `full`; they differ in how much memory the scores of a long sequence take, and in how much is
done by one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

QUERY_BLOCK_TOKENS = 256
"""Queries scored at once: scores take H · 256 · L elements whatever the prompt's length."""
KEY_BLOCK_TOKENS = 1024
"""Keys scored at once where attention is blocked: scores take H · 256 · 1024 elements whatever the sequence's length."""


def full(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

    query: (T, H, D), the sequences' new tokens end to end. keys, values: one (K, L, D) per sequence, of any strides, whose last
    `query_lengths[i]` positions belong to the new tokens; a token sees itself and what precedes it, or all of its sequence where
    `causal` is False. H is a multiple of K. scale: factor of the scores, usually D ** -0.5. Returns (T, H, D) in query's dtype;
    the softmax is taken in float32.

    The scores of a sequence are one matrix of H · n · L elements.
    """
    return by_query_block(_attend, query, keys, values, query_lengths, scale, causal, max(query_lengths, default=1))


def two_phase(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """`full`, one block of queries after the other: scores first, then the mix of values."""
    return by_query_block(_attend, query, keys, values, query_lengths, scale, causal, QUERY_BLOCK_TOKENS)


def blocked(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], query_lengths: Sequence[int], scale: float, causal: bool = True
) -> Tensor:
    """`full`, blocked over queries and keys, with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867).

    Its scratch memory is the same for every length. Sums are kept in float32.
    """
    return by_query_block(_attend_blocked, query, keys, values, query_lengths, scale, causal, QUERY_BLOCK_TOKENS)


Attend = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""Attention of the last `n` positions of one sequence: query (n, H, D); key, value (K, L, D); scale; causal. Returns (n, H, D)."""


def by_query_block(
    attend: Attend,
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    query_lengths: Sequence[int],
    scale: float,
    causal: bool,
    block_tokens: int,
) -> Tensor:
    """Attention of every sequence by `attend`, at most `block_tokens` queries at a time."""
    output = torch.empty_like(query)
    for rows, (key, value) in query_blocks(zip(keys, values, strict=True), query_lengths, causal, block_tokens):
        output[rows] = attend(query[rows], key, value, scale, causal)
    return output


def query_blocks(
    stored: Iterable[tuple[Tensor, ...]], query_lengths: Sequence[int], causal: bool, block_tokens: int
) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """(rows of queries in the batch, what they see of their sequence's tensors), at most `block_tokens` queries at a time.

    stored: for each sequence its tensors, each (K, L, …), whose last `query_lengths[i]` positions are the queries'.
    """
    start = 0
    for tensors, length in zip(stored, query_lengths, strict=True):
        for offset in range(0, length, block_tokens):
            count = min(block_tokens, length - offset)
            seen = tensors[0].shape[1] - length + offset + count if causal else tensors[0].shape[1]
            yield slice(start + offset, start + offset + count), tuple(tensor[:, :seen] for tensor in tensors)
        start += length


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    grouped = group_heads(query, key.shape[0])
    scores = torch.matmul(grouped, key.transpose(1, 2)).to(torch.float32) * scale
    if causal and query.shape[0] > 1:
        hide_following(scores, query.shape[0], key.shape[1], 0)
    mixed = torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), value)
    return ungroup_heads(mixed, query.shape[0])


def _attend_blocked(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    count, length = query.shape[0], key.shape[1]
    grouped = group_heads(query, key.shape[0])

    def score(part: slice) -> Tensor:
        return torch.matmul(grouped, key[:, part].transpose(1, 2)).to(torch.float32) * scale

    def mix(weights: Tensor, part: slice) -> Tensor:
        return torch.matmul(weights.to(query.dtype), value[:, part]).to(torch.float32)

    return ungroup_heads(running_softmax(grouped, count, length, causal, score, mix).to(query.dtype), count)


def running_softmax(
    grouped: Tensor,
    count: int,
    length: int,
    causal: bool,
    score: Callable[[slice], Tensor],
    mix: Callable[[Tensor, slice], Tensor],
) -> Tensor:
    """Attention of the last `count` of `length` positions, one block of keys after the other: (K, rows, D) float32.

    grouped: (K, rows, D), of `group_heads`. score: (K, rows, block) float32 for a block of keys, which may be written to; mix: (K, rows, D)
    float32, the block's values by such weights.
    """
    largest = torch.full((*grouped.shape[:2], 1), float("-inf"), dtype=torch.float32, device=grouped.device)
    total = torch.zeros_like(largest)
    mixed = torch.zeros(grouped.shape, dtype=torch.float32, device=grouped.device)
    for part in key_blocks(length):
        scores = score(part)
        if causal and part.stop > length - count + 1:
            hide_following(scores, count, length, part.start)
        # The first block holds a key that every query sees, so that from then on `largest` is finite.
        following = torch.maximum(largest, scores.amax(-1, keepdim=True))
        fade = torch.exp(largest - following)
        weights = scores.sub_(following).exp_()
        total = total * fade + weights.sum(-1, keepdim=True)
        mixed = mixed * fade + mix(weights, part)
        largest = following
    return mixed / total


def key_blocks(length: int) -> list[slice]:
    """Blocks of keys, in order."""
    return [slice(start, min(start + KEY_BLOCK_TOKENS, length)) for start in range(0, length, KEY_BLOCK_TOKENS)]


def group_heads(query: Tensor, kv_heads: int) -> Tensor:
    """(n, H, D) as (K, H/K · n, D): the query heads of a key/value head lie together, tokens innermost."""
    count, heads, size = query.shape
    return query.view(count, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3).reshape(kv_heads, heads // kv_heads * count, size)


def ungroup_heads(mixed: Tensor, count: int) -> Tensor:
    """(K, H/K · n, D) as (n, H, D)."""
    kv_heads, rows, size = mixed.shape
    return mixed.view(kv_heads, rows // count, count, size).permute(2, 0, 1, 3).reshape(count, kv_heads * (rows // count), size)


def hide_following(scores: Tensor, count: int, length: int, start: int) -> None:
    """Hide from each of the last `count` of `length` positions what follows it. scores: (K, H/K · count, keys from `start` on)."""
    kv_heads, rows, width = scores.shape
    hidden = torch.ones((count, width), dtype=torch.bool, device=scores.device).triu_(length - count + 1 - start)
    scores.view(kv_heads, rows // count, count, width).masked_fill_(hidden, float("-inf"))
