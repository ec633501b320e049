"""Rates and percentiles from what changed between scrapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_monitor.collectors.engine import CumulativeHistogram, EngineSample
from npufleet_monitor.window import PERCENTILE_SECONDS, EngineWindow, WindowFigures, histogram_percentiles

BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def histogram(values: list[float]) -> CumulativeHistogram:
    return CumulativeHistogram(BOUNDS, tuple(sum(value <= bound for value in values) for bound in BOUNDS), len(values))


def sample(generation: float = 0, *, ttft: list[float] | None = None, finished: float = 0, timeouts: float = 0) -> EngineSample:
    return EngineSample(
        prompt_tokens=2 * generation, generation_tokens=generation, finished=finished, timeouts=timeouts, ttft=histogram(ttft or [])
    )


def test_one_scrape_says_nothing() -> None:
    window = EngineWindow()
    assert window.figures() == WindowFigures()
    window.add(0, sample(100))
    assert window.figures() == WindowFigures()


def test_rates_are_those_of_the_last_seconds_and_percentiles_those_of_the_last_minute() -> None:
    window = EngineWindow()
    for second in range(0, 122, 2):
        window.add(second, sample(10 * second if second < 100 else 1000 + 50 * (second - 100), ttft=[0.3] * second))
    figures = window.figures()
    assert figures.generation_tokens_per_second == pytest.approx(50)
    assert figures.prompt_tokens_per_second == pytest.approx(100)
    assert figures.ttft_p50_ms == pytest.approx(350)
    assert figures.tpot_p50_ms is None


def test_what_happened_before_the_window_does_not_count() -> None:
    window = EngineWindow()
    slow, quick = [4.0] * 100, [0.015] * 10
    window.add(0, sample(ttft=slow))
    window.add(PERCENTILE_SECONDS, sample(ttft=slow + quick))
    figures = window.figures()
    assert figures.ttft_p95_ms is not None
    assert figures.ttft_p95_ms < 21


def test_without_requests_percentiles_and_timeouts_are_unknown_and_rates_zero() -> None:
    window = EngineWindow()
    window.add(0, sample(10, ttft=[1.0], finished=4, timeouts=1))
    window.add(5, sample(10, ttft=[1.0], finished=4, timeouts=1))
    assert window.figures() == WindowFigures(prompt_tokens_per_second=0, generation_tokens_per_second=0)


def test_the_share_of_timeouts_is_that_of_the_requests_that_ended_in_the_window() -> None:
    window = EngineWindow()
    window.add(0, sample(finished=100, timeouts=50))
    window.add(5, sample(finished=120, timeouts=51))
    assert window.figures().timeout_percent == pytest.approx(5)


def test_an_engine_that_restarted_starts_a_new_window() -> None:
    window = EngineWindow()
    window.add(0, sample(1000, ttft=[4.0] * 50))
    window.add(2, sample(10))
    assert window.figures() == WindowFigures()
    window.add(4, sample(30))
    assert window.figures().generation_tokens_per_second == pytest.approx(10)


def test_a_histogram_that_appears_later_counts_from_nothing() -> None:
    first, second = CumulativeHistogram(), histogram([0.015, 0.015])
    (found,) = histogram_percentiles(first, second, (0.5,))
    assert found == pytest.approx(0.015)


def test_other_bounds_are_not_compared() -> None:
    assert histogram_percentiles(histogram([1.0]), CumulativeHistogram((1.0,), (3,), 3), (0.5,)) == (None,)


@given(
    st.lists(st.floats(0, 10), max_size=40),
    st.lists(st.floats(0, 10), min_size=1, max_size=40),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=4),
)
def test_a_percentile_lies_in_the_bucket_of_its_rank(before: list[float], during: list[float], shares: list[float]) -> None:
    found = histogram_percentiles(histogram(before), histogram(before + during), tuple(shares))
    for share, value in zip(shares, found, strict=True):
        rank = max(1, math.ceil(share * len(during) - 1e-9))
        truth = sorted(during)[rank - 1]
        lower = max((bound for bound in BOUNDS if bound < truth), default=0.0)
        upper = min((bound for bound in BOUNDS if bound >= truth), default=BOUNDS[-1])
        assert value is not None
        assert min(lower, BOUNDS[-1]) - 1e-9 <= value <= upper + 1e-9


COUNTS = st.lists(st.floats(0, 1e12), min_size=len(BOUNDS), max_size=len(BOUNDS)).map(tuple)


SAMPLES = st.builds(
    lambda counts, total, generation: EngineSample(generation_tokens=generation, ttft=CumulativeHistogram(BOUNDS, counts, total)),
    COUNTS,
    st.floats(0, 1e12),
    st.none() | st.floats(0, 1e15),
)


@given(st.lists(SAMPLES, max_size=8))
def test_whatever_an_engine_shows_figures_are_finite_and_not_negative(samples: list[EngineSample]) -> None:
    window = EngineWindow()
    for number, one in enumerate(samples):
        window.add(float(number), one)
        figures = window.figures()
        for value in (figures.ttft_p50_ms, figures.ttft_p95_ms, figures.generation_tokens_per_second, figures.timeout_percent):
            assert value is None or (value >= 0 and math.isfinite(value))


def test_memory_is_bounded() -> None:
    window = EngineWindow()
    for number in range(5000):
        window.add(number / 100, sample(number))
    assert len(window._samples) <= 400


def test_prefill_speed_and_prefix_hits_are_those_of_the_last_minute() -> None:
    window = EngineWindow()
    window.add(0, EngineSample(prompt_tokens=1000, prefix_queries=1000, prefix_hits=500, prefill_seconds=9))
    window.add(10, EngineSample(prompt_tokens=2000, prefix_queries=2000, prefix_hits=600, prefill_seconds=10))
    figures = window.figures()
    assert figures.prefill_tokens_per_second == pytest.approx(900)
    assert figures.prefix_hit_percent == pytest.approx(10)
    window.add(20, EngineSample(prompt_tokens=10, prefix_queries=1, prefix_hits=0, prefill_seconds=0))
    window.add(30, EngineSample(prompt_tokens=10, prefix_queries=1, prefix_hits=0, prefill_seconds=0))
    assert window.figures().prefill_tokens_per_second is None
    assert window.figures().prefix_hit_percent is None
