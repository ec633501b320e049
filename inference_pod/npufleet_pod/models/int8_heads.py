"""Chooses the KV heads that are cached as INT8, by what it costs the model's predictions.

A head costs the divergence of the next token's distribution when it alone is INT8. Heads are taken from the cheapest on, as many as keep
two limits together: the divergence, of which the rise of log-perplexity is a sample on text that the model would write, and the measured
rise itself. The first hardly varies from text to text, so it decides; the second holds it to the text at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npufleet_api.calibration import Int8KvHeads
from npufleet_pod.errors import LoadCancelledError
from npufleet_pod.models.decoder import Decoder
from npufleet_pod.models.perplexity import Heads, divergence, hidden_states, loss_percent, no_heads, window_losses

LIMIT_PERCENT = 0.1
"""Default of the perplexity that may be lost."""
BUDGET_SHARE = 0.5
"""Share of the limit that the divergence on the calibration's text may take: other texts cost more or less."""
RANKING_TOKENS = 256
"""Tokens by which single heads are measured; heads differ by a factor of a hundred, so few tell them apart."""


@dataclass(frozen=True, slots=True)
class Int8HeadsChoice:
    """The heads, and what was measured. Percentages are of perplexity."""

    heads: tuple[tuple[int, ...], ...]
    limit_percent: float
    loss_percent: float
    loss_error_percent: float
    """Standard error of the loss, from one text to another of the same kind and length."""
    divergence_percent: float
    """exp of the divergence, less 1: the loss to expect on text that the model would write."""
    sensitivities: tuple[tuple[float, ...], ...]
    """Of each layer's heads: divergence in nats when it alone is INT8."""

    @property
    def count(self) -> int:
        """Heads of all layers."""
        return sum(len(layer) for layer in self.heads)

    def calibration(self) -> Int8KvHeads:
        """As the calibration file has it."""
        layers = [list(layer) for layer in self.heads]
        return Int8KvHeads(layers=layers, perplexity_loss_percent=self.loss_percent, limit_percent=self.limit_percent)


def choose_int8_heads(
    decoder: Decoder,
    windows: Sequence[Sequence[int]],
    limit_percent: float = LIMIT_PERCENT,
    ranking_tokens: int = RANKING_TOKENS,
    keep_going: Callable[[], bool] = lambda: True,
) -> Int8HeadsChoice:
    """As many heads as cost at most `limit_percent` of the perplexity on `windows`, each at least two tokens of a text.

    decoder: all of its heads in the type of its attention; under tensor parallelism every rank makes the same call. Takes one pass over
    `ranking_tokens` per head, and about log2 of all heads over all of the text. Raises ValueError for a text of no window, and
    LoadCancelledError once `keep_going` answers False, which is asked before each head.
    """
    if not any(len(window) > 1 for window in windows):
        raise ValueError("the text has no two tokens: give more of it")
    text = _Text(decoder, [window for window in windows if len(window) > 1], limit_percent)
    sensitivities = head_sensitivities(decoder, _beginning(windows, ranking_tokens), keep_going)
    order = sorted(((layer, head) for layer, costs in enumerate(sensitivities) for head in range(len(costs))), key=_cost_of(sensitivities))
    # The most heads that keep the limits, by bisection: costs add up, so more heads cost more but for the noise of the measured loss.
    good, bad = _Measured(no_heads(decoder), 0.0, 0.0, 0.0), len(order) + 1
    count = 0
    while bad - count > 1:
        if not keep_going():
            raise LoadCancelledError("the choice of heads was given up since the process ends")
        middle = _next_try(order, sensitivities, count, bad, text.budget)
        measured = text.measure(_grouped(order[:middle], decoder.config.layers))
        if text.keeps(measured):
            count, good = middle, measured
        else:
            bad = middle
    return Int8HeadsChoice(
        heads=tuple(tuple(layer) for layer in good.heads),
        limit_percent=limit_percent,
        loss_percent=good.loss_percent,
        loss_error_percent=good.loss_error_percent,
        divergence_percent=100 * math.expm1(good.divergence),
        sensitivities=sensitivities,
    )


def head_sensitivities(
    decoder: Decoder, windows: Sequence[Sequence[int]], keep_going: Callable[[], bool] = lambda: True
) -> tuple[tuple[float, ...], ...]:
    """Divergence in nats, of each layer's KV heads, when it alone is INT8; the mean over the tokens of `windows`."""
    config, tokens = decoder.config, sum(len(window) for window in windows)
    before = [hidden_states(decoder, window) for window in windows]
    costs = []
    for layer in range(config.layers):
        own = []
        for head in range(config.kv_heads):
            if not keep_going():
                raise LoadCancelledError("the choice of heads was given up since the process ends")
            heads = _grouped([(layer, head)], config.layers)
            moved = sum(
                len(window) * divergence(decoder, hidden, hidden_states(decoder, window, heads))
                for window, hidden in zip(windows, before, strict=True)
            )
            own.append(moved / tokens)
        costs.append(tuple(own))
    return tuple(costs)


@dataclass(frozen=True, slots=True)
class _Measured:
    heads: Heads
    divergence: float
    loss_percent: float
    loss_error_percent: float


class _Text:
    """The calibration's text, and what the model makes of it without INT8."""

    def __init__(self, decoder: Decoder, windows: Sequence[Sequence[int]], limit_percent: float) -> None:
        self._decoder = decoder
        self._windows = windows
        self._limit_percent = limit_percent
        self.budget = BUDGET_SHARE * math.log1p(limit_percent / 100)
        self._hidden: list[Tensor] = [hidden_states(decoder, window) for window in windows]
        pairs = zip(windows, self._hidden, strict=True)
        self._losses = torch.cat([window_losses(decoder, window, hidden) for window, hidden in pairs])

    def measure(self, heads: Heads) -> _Measured:
        moved, losses = 0.0, []
        for window, before in zip(self._windows, self._hidden, strict=True):
            after = hidden_states(self._decoder, window, heads)
            moved += len(window) * divergence(self._decoder, before, after)
            losses.append(window_losses(self._decoder, window, after))
        loss, error = loss_percent(self._losses, torch.cat(losses))
        return _Measured(heads, moved / sum(len(window) for window in self._windows), loss, error)

    def keeps(self, measured: _Measured) -> bool:
        return measured.divergence <= self.budget and measured.loss_percent <= self._limit_percent


def _beginning(windows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    """The first `tokens` tokens of the text."""
    taken: list[Sequence[int]] = []
    for window in windows:
        part = window[:tokens]
        if len(part) > 1:
            taken.append(part)
        tokens -= len(part)
    return taken


def _cost_of(sensitivities: Sequence[Sequence[float]]) -> Callable[[tuple[int, int]], float]:
    return lambda place: sensitivities[place[0]][place[1]]


def _grouped(places: Sequence[tuple[int, int]], layers: int) -> Heads:
    grouped: list[list[int]] = [[] for _ in range(layers)]
    for layer, head in sorted(places):
        grouped[layer].append(head)
    return grouped


def _next_try(order: Sequence[tuple[int, int]], sensitivities: Sequence[Sequence[float]], good: int, bad: int, budget: float) -> int:
    """A number of heads between what is known to keep the limits and what is known not to: first what single costs predict, then halves."""
    if good == 0 and bad == len(order) + 1:
        total = 0.0
        for count, place in enumerate(order):
            total += _cost_of(sensitivities)(place)
            if total > budget:
                return max(1, count)
        return len(order)
    return (good + bad) // 2
