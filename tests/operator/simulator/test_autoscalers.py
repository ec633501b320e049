"""HPA and KPA against tables that were worked out by hand from their documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_operator.simulator.autoscalers import Hpa, Kpa, hpa_desired


@pytest.mark.parametrize(
    ("current", "metrics", "unready", "target", "desired"),
    [
        (2, [10, 10], 0, 10, 2),
        (2, [10.9, 10.9], 0, 10, 2),  # within the tolerance
        (2, [11.2, 11.2], 0, 10, 3),  # ceil(1.12 · 2)
        (4, [5, 5, 5, 5], 0, 10, 2),
        (4, [9.5, 9.5, 9.5, 9.5], 0, 10, 4),  # within the tolerance
        (3, [20, 20], 1, 10, 4),  # the unready one counts as 0: 40/3/10 = 1.33, ceil(1.33 · 3)
        (4, [15, 15], 2, 10, 4),  # 30/4/10 = 0.75 turns the direction round
        (3, [2, 2], 1, 10, 2),  # the unready one counts as the target: 14/3/10 = 0.47, ceil(0.47 · 3)
        (3, [], 3, 10, 3),  # no metrics: no change
        (1, [100], 0, 10, 10),
        (3, [0, 0, 0], 0, 10, 0),
    ],
)
def test_hpa_replicas_follow_the_ratio(current: int, metrics: list[float], unready: int, target: float, desired: int) -> None:
    assert hpa_desired(current, metrics, unready, target) == desired


def test_hpa_goes_up_at_once_and_down_after_five_minutes() -> None:
    hpa = Hpa(minimum=1, maximum=10, target=10)
    assert hpa.decide(0, 2, [30, 30], 0) == 6
    assert hpa.decide(15, 6, [5] * 6, 0) == 6
    assert hpa.decide(300, 6, [5] * 6, 0) == 6
    assert hpa.decide(301, 6, [5] * 6, 0) == 3


def test_hpa_adds_at_most_twice_as_many_or_four_per_sync() -> None:
    assert Hpa(1, 100, 10).decide(0, 1, [1000], 0) == 5
    assert Hpa(1, 100, 10).decide(0, 10, [1000] * 10, 0) == 20


def test_hpa_keeps_its_bounds() -> None:
    assert Hpa(2, 4, 10).decide(0, 2, [1000, 1000], 0) == 4
    assert Hpa(2, 4, 10).decide(0, 2, [0, 0], 0) == 2


def test_kpa_scales_on_the_average_of_a_minute() -> None:
    kpa = Kpa(minimum=1, maximum=100, target=10)
    decisions = [kpa.decide(2.0 * tick, 45, 5) for tick in range(31)]
    assert set(decisions) == {5}


def test_kpa_panics_at_twice_what_the_ready_pods_hold_and_does_not_shrink_while_it_does() -> None:
    kpa = Kpa(minimum=1, maximum=100, target=10)
    for tick in range(30):
        assert kpa.decide(2.0 * tick, 20, 2) == 2
    assert kpa.decide(60, 100, 2) == 5  # panic average (20 + 20 + 100)/3 = 46.7, ceil to 5 ≥ 2 · 2
    assert kpa.panic_until == 120
    assert kpa.decide(62, 100, 2) == 8  # (20 + 100 + 100)/3 = 73.3; panic lasts until 122
    for tick in range(32, 61):
        assert kpa.decide(2.0 * tick, 0, 8) == 8
    assert kpa.decide(122, 0, 8) == 4


def test_kpa_leaves_panic_after_a_whole_stable_window() -> None:
    kpa = Kpa(minimum=1, maximum=100, target=10)
    kpa.decide(0, 100, 1)
    assert kpa.panic_until == 60
    for tick in range(1, 30):
        assert kpa.decide(2.0 * tick, 5, 10) == 10
    assert kpa.decide(60, 5, 10) < 10
    assert kpa.panic_until is None


def test_kpa_at_most_halves_per_tick() -> None:
    kpa = Kpa(minimum=1, maximum=100, target=10)
    assert kpa.decide(0, 0, 16) == 8
    assert kpa.decide(2, 0, 8) == 4


@given(st.integers(1, 5), st.integers(0, 10), st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 20)), max_size=40))
def test_both_keep_their_bounds_whatever_comes(low: int, more: int, load: list[tuple[float, int]]) -> None:
    hpa, kpa = Hpa(low, low + more, 7.0), Kpa(low, low + more, 7.0)
    for tick, (in_flight, ready) in enumerate(load):
        assert low <= hpa.decide(15.0 * tick, max(1, ready), [in_flight] * ready, 1) <= low + more
        assert low <= kpa.decide(2.0 * tick, in_flight, ready) <= low + more
