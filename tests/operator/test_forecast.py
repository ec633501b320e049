"""The slow loop's forecast: it follows what rises, forgets what fell, knows a season, and promises nothing that was never seen."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_operator.core.autoscale.forecast import GROWTH_LIMIT, forecast


def test_nothing_known_is_nothing_forecast() -> None:
    assert forecast([], 5) == 0


def test_a_constant_series_stays() -> None:
    assert forecast([7.0] * 60, 10) == pytest.approx(7)


def test_a_rise_is_followed_beyond_its_last_value() -> None:
    series = [float(i) for i in range(20)]
    assert series[-1] - 2 < forecast(series, 1) < series[-1] + 2
    assert forecast(series, 5) > forecast(series, 1)


def test_a_load_that_ended_is_forgotten() -> None:
    assert forecast([100.0] * 20 + [0.0] * 20, 5) < 1


def test_a_season_is_expected_again() -> None:
    day = [10.0] * 6 + [100.0] * 2 + [10.0] * 4
    series = day * 3 + day[:5]
    assert forecast(series, 2, season=len(day)) > 50
    assert forecast(series, 2) < 50


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=100), st.integers(-3, 60), st.integers(0, 30))
def test_it_is_bounded_by_what_was_seen(series: list[float], steps: int, season: int) -> None:
    assert 0 <= forecast(series, steps, season) <= GROWTH_LIMIT * max(series)
