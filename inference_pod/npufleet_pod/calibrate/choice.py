"""What is chosen from measured times: pure, and the same for the same points. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf, log2
from statistics import median

from npufleet_api.calibration import AttentionPoint, BatchPoint
from npufleet_pod.engine.fusion import ORDER, FusionThresholds
from npufleet_pod.models.fusion_plan import AttentionStrategy

CLOSE = 0.01
"""Thresholds that cost at most this share more than the best are as good: of them, those nearest to the defaults are taken, so that noise
moves nothing."""
NEARLY_BEST = 0.05
"""A smaller batch that reaches the best throughput but for this share is preferred: it answers sooner and takes less memory."""

DEFAULTS = FusionThresholds()


def choose_thresholds(points: Sequence[AttentionPoint], defaults: FusionThresholds = DEFAULTS) -> FusionThresholds:
    """Thresholds with the least time over all measured lengths, each of which counts alike, as do prompts and next tokens.

    A cost is a time relative to the best strategy's at that length and number of new tokens. Whatever the noise, strategies come in
    their order: all pairs of lengths are tried as thresholds, and no single crossing decides. A strategy that was not measured at a
    length is not used there. Without points, the defaults.
    """
    costs = _costs(points)
    lengths = sorted(costs)
    if not lengths:
        return defaults
    edges = [0, *lengths]
    tried = [
        (sum(costs[length][_strategy(length, full, two_phase)] for length in lengths), full, two_phase)
        for first, full in enumerate(edges)
        for two_phase in edges[first:]
    ]
    best = min(cost for cost, _, _ in tried)
    good = [(full, two_phase) for cost, full, two_phase in tried if cost <= best + CLOSE * len(lengths)]
    full, two_phase = min(good, key=lambda pair: _distance(pair[0], defaults.full_tokens) + _distance(pair[1], defaults.two_phase_tokens))
    # One token is the shortest sequence there is: nothing else is computed at once then.
    return FusionThresholds(max(1, full), max(1, full, two_phase))


def choose_batch(points: Sequence[BatchPoint]) -> int:
    """The smallest batch whose throughput, the median of its points, is within NEARLY_BEST of the best.

    Raises ValueError without points.
    """
    measured: dict[int, list[float]] = defaultdict(list)
    for point in points:
        measured[point.sequences].append(point.tokens_per_second)
    if not measured:
        raise ValueError("no batch size was measured: there is nothing to choose from")
    speeds = {sequences: median(values) for sequences, values in measured.items()}
    enough = max(speeds.values()) * (1 - NEARLY_BEST)
    return min(sequences for sequences, speed in speeds.items() if speed >= enough)


def _costs(points: Sequence[AttentionPoint]) -> dict[int, dict[AttentionStrategy, float]]:
    """Relative time of each strategy by length: the mean over what was measured there, infinite where a strategy was left out."""
    times: dict[tuple[int, bool], dict[AttentionStrategy, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        times[point.tokens, point.new_tokens == 1][AttentionStrategy(point.strategy)].append(point.milliseconds)
    relative: dict[int, list[dict[AttentionStrategy, float]]] = defaultdict(list)
    for (length, _), by_strategy in times.items():
        medians = {strategy: median(values) for strategy, values in by_strategy.items()}
        best = min(medians.values())
        relative[length].append({strategy: medians[strategy] / best if strategy in medians else inf for strategy in ORDER})
    return {
        length: {strategy: sum(phase[strategy] for phase in phases) / len(phases) for strategy in ORDER}
        for length, phases in relative.items()
        if any(all(phase[strategy] < inf for phase in phases) for strategy in ORDER)
    }


def _strategy(length: int, full: int, two_phase: int) -> AttentionStrategy:
    if length <= full:
        return AttentionStrategy.FULL
    return AttentionStrategy.TWO_PHASE if length <= two_phase else AttentionStrategy.BLOCKED


def _distance(one: int, other: int) -> float:
    return abs(log2(max(1, one)) - log2(max(1, other)))
