"""How well a decoder predicts a text, and how far its predictions move when some KV heads are cached as INT8.

Each window of a text is computed at once and from an empty context, so nothing is cached: keys and values of the heads in question are
quantised and widened again on their way into attention, which reads what an INT8 cache would hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from npufleet_kernels import int8
from npufleet_kernels.head_groups import HeadGroup
from npufleet_pod.models.decoder import Decoder

ROWS_AT_ONCE = 64
"""Positions whose scores of the whole vocabulary are widened to float64 at once."""

Heads = Sequence[Sequence[int]]
"""KV heads of each layer, numbered over the whole model."""


class _Passing:
    """Hands on what it is given; the heads in question as INT8 would give them back. A `BatchCache` of one sequence."""

    def __init__(self, decoder: Decoder, heads: Heads) -> None:
        own = decoder.part.kv_heads
        self._heads = [[head - own.start for head in layer if own.start <= head < own.stop] for layer in heads]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[HeadGroup]:
        heads = self._heads[layer]
        keys, values = (_rounded(part, heads) if heads else part for part in (keys, values))
        return (HeadGroup(keys.shape[1], [keys.transpose(0, 1)], [values.transpose(0, 1)]),)


def _rounded(part: Tensor, heads: Sequence[int]) -> Tensor:
    part = part.clone()
    part[:, heads] = int8.dequantise(*int8.quantise(part[:, heads])).to(part.dtype)
    return part


def no_heads(decoder: Decoder) -> Heads:
    """None of any layer."""
    return [()] * decoder.config.layers


def windows_of(tokens: Sequence[int], window_tokens: int) -> list[Sequence[int]]:
    """The text in pieces of `window_tokens`; a last one of a single token, which predicts nothing, is left out."""
    pieces = [tokens[start : start + window_tokens] for start in range(0, len(tokens), window_tokens)]
    return [piece for piece in pieces if len(piece) > 1]


def token_losses(decoder: Decoder, windows: Sequence[Sequence[int]], heads: Heads | None = None) -> Tensor:
    """Negative log-probability of each token but the first of each window: float64 on the CPU. heads: those cached as INT8; None: none."""
    found = [window_losses(decoder, window, hidden_states(decoder, window, heads)) for window in windows]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def window_losses(decoder: Decoder, window: Sequence[int], hidden: Tensor) -> Tensor:
    """As `token_losses` of one window, from the decoder's output for it."""
    targets = torch.tensor(window[1:]).unsqueeze(1)
    found = [-log_probabilities(decoder, hidden[rows]).gather(1, targets[rows]).squeeze(1) for rows in _rows(len(window) - 1)]
    return torch.cat(found)


def divergence(decoder: Decoder, hidden: Tensor, changed: Tensor) -> float:
    """Of the next token's distribution after `changed` from that after `hidden`, each (T, hidden): Kullback-Leibler's mean, in nats."""
    total = 0.0
    for rows in _rows(hidden.shape[0]):
        before, after = log_probabilities(decoder, hidden[rows]), log_probabilities(decoder, changed[rows])
        total += float((before.exp() * (before - after)).sum())
    return total / max(1, hidden.shape[0])


def hidden_states(decoder: Decoder, window: Sequence[int], heads: Heads | None = None) -> Tensor:
    """The decoder's output at every token of a window, (T, hidden)."""
    ids = torch.tensor(window, device=decoder.device)
    count = len(window)
    lengths = torch.full((count,), count, device=decoder.device)
    with torch.inference_mode():
        passing = _Passing(decoder, no_heads(decoder) if heads is None else heads)
        return decoder.forward(ids, torch.arange(count, device=decoder.device), [count], passing, lengths)


def log_probabilities(decoder: Decoder, hidden: Tensor) -> Tensor:
    """Of the next token: hidden (n, hidden) to (n, vocabulary), float64 on the CPU, since small changes are told apart by differences."""
    with torch.inference_mode():
        return torch.log_softmax(decoder.logits(hidden).cpu().to(torch.float64), dim=-1)


def perplexity(losses: Tensor) -> float:
    """exp of the mean loss."""
    return math.exp(float(losses.mean()))


def loss_percent(before: Tensor, after: Tensor) -> tuple[float, float]:
    """(by how much perplexity rose, the standard error of that), in percent of the former, from the same tokens' losses.

    Tokens are taken as independent; the difference is paired, so that what a text has of easy and hard tokens does not count.
    """
    rise = after - before
    mean = float(rise.mean())
    spread = float(rise.std()) / math.sqrt(len(rise)) if len(rise) > 1 else 0.0
    return 100 * math.expm1(mean), 100 * math.exp(mean) * spread


def _rows(count: int) -> Iterator[slice]:
    for start in range(0, count, ROWS_AT_ONCE):
        yield slice(start, min(start + ROWS_AT_ONCE, count))
