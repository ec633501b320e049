"""How a step is computed: how much by one operation, and attention by which strategy. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class AttentionStrategy(StrEnum):
    """Short sequences are computed at once, middle ones in two phases, long ones in blocks."""

    FULL = "Full"
    """All scores of a sequence in one matrix."""
    TWO_PHASE = "TwoPhase"
    """Block by block of queries: scores first, then the mix of values."""
    BLOCKED = "Blocked"
    """Block by block of queries and keys, with a running softmax: scratch memory does not grow with the sequence."""


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Sequences that follow each other in the batch and share a strategy."""

    strategy: AttentionStrategy
    sequences: int


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Of one step. level: 1 pairs of operators, 2 half layers, 3 whole layers. runs: add up to the batch's sequences, in order."""

    level: int
    runs: tuple[AttentionRun, ...]


def uniform_plan(sequences: int, strategy: AttentionStrategy = AttentionStrategy.BLOCKED, level: int = 1) -> FusionPlan:
    """One strategy for all sequences."""
    return FusionPlan(level, (AttentionRun(strategy, sequences),))


def plan_of(level: int, strategies: Sequence[AttentionStrategy]) -> FusionPlan:
    """The plan of a batch whose sequence i is computed by `strategies[i]`."""
    runs: list[AttentionRun] = []
    for strategy in strategies:
        if runs and runs[-1].strategy is strategy:
            runs[-1] = AttentionRun(strategy, runs[-1].sequences + 1)
        else:
            runs.append(AttentionRun(strategy, 1))
    return FusionPlan(level, tuple(runs))
