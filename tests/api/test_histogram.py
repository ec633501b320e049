"""Percentiles within the promised error."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.histogram import BINS, GROWTH, HIGHEST, LOWEST, bin_of, middle_of, percentiles

VALUES = st.floats(min_value=LOWEST, max_value=HIGHEST)


@given(VALUES)
def test_a_bins_middle_is_within_the_error_of_every_value_in_it(value: float) -> None:
    assert abs(middle_of(bin_of(value)) / value - 1) <= math.sqrt(GROWTH) - 1 + 1e-9


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_every_value_has_a_bin(value: float) -> None:
    assert 0 <= bin_of(value) < BINS


@given(st.lists(VALUES, min_size=1, max_size=60), st.lists(st.floats(0.01, 1), min_size=1, max_size=4).map(sorted), st.integers(1, 4))
def test_percentiles_are_nearest_rank_within_the_error_over_any_split(values: list[float], shares: list[float], parts: int) -> None:
    histograms: list[dict[int, int]] = [{} for _ in range(parts)]
    for number, value in enumerate(values):
        part = histograms[number % parts]
        part[bin_of(value)] = part.get(bin_of(value), 0) + 1
    ordered = sorted(values)
    for share, found in zip(shares, percentiles(histograms, tuple(shares)), strict=True):
        truth = ordered[max(1, math.ceil(share * len(values))) - 1]
        assert found is not None
        assert abs(found / truth - 1) <= math.sqrt(GROWTH) - 1 + 1e-9


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([], (0.5, 0.95)) == (None, None)
    assert percentiles([{}, {}], (0.5,)) == (None,)
