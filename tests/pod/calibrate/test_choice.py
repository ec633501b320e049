"""Thresholds and batch size from points: by hand, and whatever was measured."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.calibration import AttentionPoint, BatchPoint
from npufleet_pod.calibrate.choice import CLOSE, NEARLY_BEST, choose_batch, choose_thresholds
from npufleet_pod.engine.fusion import ORDER, DynamicFusionManager, FusionThresholds
from npufleet_pod.models.fusion_plan import AttentionStrategy

FULL, TWO_PHASE, BLOCKED = ORDER
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def points(times: dict[AttentionStrategy, tuple[float, ...]], new_tokens: int = 1) -> list[AttentionPoint]:
    return [
        AttentionPoint(strategy=strategy.value, tokens=length, new_tokens=new_tokens, milliseconds=milliseconds)
        for strategy, row in times.items()
        for length, milliseconds in zip(LENGTHS, row, strict=False)
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # Each is best in its range.
        ({FULL: (1, 1, 1, 2, 9, 9, 9), TWO_PHASE: (2, 2, 2, 1, 1, 2, 9), BLOCKED: (3, 3, 3, 3, 3, 1, 1)}, (256, 1024)),
        ({FULL: (1,) * 7, TWO_PHASE: (2,) * 7, BLOCKED: (3,) * 7}, (4096, 4096)),
        ({FULL: (3,) * 7, TWO_PHASE: (1,) * 7, BLOCKED: (2,) * 7}, (1, 4096)),
        ({FULL: (3,) * 7, TWO_PHASE: (2,) * 7, BLOCKED: (1,) * 7}, (1, 1)),
        # One bad measurement moves nothing.
        ({FULL: (1, 1, 9, 1, 9, 9, 9), TWO_PHASE: (2, 2, 2, 2, 1, 1, 9), BLOCKED: (9, 9, 9, 9, 2, 2, 1)}, (128, 2048)),
        ({FULL: (1, 1, 1.3, 1, 9, 9, 9), TWO_PHASE: (2, 2, 1, 2, 1, 1, 9), BLOCKED: (9, 9, 9, 9, 2, 2, 1)}, (512, 2048)),
        # Where all are alike, the defaults stand.
        ({FULL: (1,) * 7, TWO_PHASE: (1.001,) * 7, BLOCKED: (1,) * 7}, (512, 2048)),
        # Full was left out where its scores take too much memory.
        ({FULL: (1, 1, 1), TWO_PHASE: (5,) * 7, BLOCKED: (6,) * 7}, (256, 4096)),
        ({}, (512, 2048)),
    ],
)
def test_thresholds_lie_where_strategies_cross(times: dict[AttentionStrategy, tuple[float, ...]], expected: tuple[int, int]) -> None:
    chosen = choose_thresholds(points(times))
    assert (chosen.full_tokens, chosen.two_phase_tokens) == expected


def test_prompts_and_next_tokens_count_alike() -> None:
    prompts = points({FULL: (1, 1, 1, 4, 4, 4, 4), TWO_PHASE: (2,) * 7, BLOCKED: (9,) * 7}, new_tokens=64)
    answers = points({FULL: (1,) * 7, TWO_PHASE: (1.5,) * 7, BLOCKED: (9,) * 7})
    assert choose_thresholds(prompts) == FusionThresholds(256, 4096)
    assert choose_thresholds(answers) == FusionThresholds(4096, 4096)
    assert choose_thresholds(prompts + answers) == FusionThresholds(256, 4096)


@given(st.lists(st.tuples(*[st.floats(0.01, 100)] * 3), min_size=1, max_size=7))
def test_no_fixed_strategy_is_better_than_what_is_chosen(rows: list[tuple[float, float, float]]) -> None:
    measured = points({strategy: tuple(row[index] for row in rows) for index, strategy in enumerate(ORDER)})
    chosen = choose_thresholds(measured)
    assert 1 <= chosen.full_tokens <= chosen.two_phase_tokens
    manager = DynamicFusionManager(1, 1, chosen)

    def cost(strategies: list[AttentionStrategy]) -> float:
        return sum(row[ORDER.index(strategy)] / min(row) for row, strategy in zip(rows, strategies, strict=True))

    own = cost([manager.strategy(1, length) for length in LENGTHS[: len(rows)]])
    assert all(own <= cost([strategy] * len(rows)) + CLOSE * len(rows) + 1e-9 for strategy in ORDER)


@given(st.floats(0, 0.2), st.integers(0, 1000))
def test_noise_hardly_costs_anything(noise: float, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    exact = {FULL: (1, 1, 1, 1, 3, 6, 9), TWO_PHASE: (2, 2, 2, 2, 1, 1, 3), BLOCKED: (4, 4, 4, 4, 3, 3, 1)}
    noisy = {strategy: tuple(one * (1 + draw.uniform(0, noise)) for one in row) for strategy, row in exact.items()}
    assert choose_thresholds(points(noisy)) == FusionThresholds(512, 2048)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 10.0, 32: 100.0, 64: 150.0, 128: 200.0}, 128),
        ({1: 10.0, 32: 100.0, 64: 196.0, 128: 200.0}, 64),
        ({1: 10.0, 32: 100.0, 64: 90.0, 128: 80.0}, 32),
        ({7: 1.0}, 7),
    ],
)
def test_the_smallest_batch_that_is_nearly_the_fastest_is_taken(speeds: dict[int, float], expected: int) -> None:
    assert choose_batch([BatchPoint(sequences=size, tokens_per_second=speed) for size, speed in speeds.items()]) == expected


def test_a_batch_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        choose_batch([])


@given(st.dictionaries(st.integers(1, 4096), st.floats(0.1, 1e6), min_size=1, max_size=20))
def test_the_batch_is_one_of_those_measured_and_none_smaller_is_as_good(speeds: dict[int, float]) -> None:
    chosen = choose_batch([BatchPoint(sequences=size, tokens_per_second=speed) for size, speed in speeds.items()])
    enough = max(speeds.values()) * (1 - NEARLY_BEST)
    assert speeds[chosen] >= enough
    assert all(speed < enough for size, speed in speeds.items() if size < chosen)
