"""The sliding window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.slo import Exchange, Outcome, SloTargets
from npufleet_api.traffic import TrafficWindow

TARGETS = SloTargets(ttft_ms=100)


def ok(ttft_ms: float = 50) -> Exchange:
    return Exchange(Outcome.OK, True, 1000, ttft_ms, 10)


def test_a_request_leaves_the_window_when_its_bucket_does() -> None:
    window = TrafficWindow(window_seconds=300, buckets=30)
    window.record(ok(), TARGETS, 1000)
    assert window.summary(1299.9).outcomes.ok == 1
    assert window.summary(1300).outcomes.ok == 0
    window.record(ok(), TARGETS, 1309)
    assert window.summary(1599).outcomes.ok == 1
    assert window.summary(1600).outcomes.ok == 0


def test_attainment_and_percentiles_are_those_of_the_window() -> None:
    window = TrafficWindow()
    for number in range(100):
        window.record(ok(ttft_ms=number + 1), TARGETS, number)
    window.record(Exchange(Outcome.NO_REPLICA, True, 1), TARGETS, 100)
    window.record(Exchange(Outcome.CLIENT_ERROR, False, 1), TARGETS, 100)
    summary = window.summary(100)
    assert (summary.judged, summary.attained) == (101, 100)
    assert summary.ttft_p50_ms == pytest.approx(50, rel=0.02)
    assert summary.ttft_p95_ms == pytest.approx(95, rel=0.02)
    assert summary.outcomes.total == 102
    assert summary.outcomes.failed == 1


@given(st.lists(st.tuples(st.floats(0, 2000), st.sampled_from(list(Outcome)), st.floats(0.1, 1000)), max_size=60))
def test_the_window_counts_what_is_in_it_and_keeps_bounded_memory(requests: list[tuple[float, Outcome, float]]) -> None:
    window = TrafficWindow(window_seconds=100, buckets=10)
    now = 0.0
    recorded: list[tuple[float, Outcome]] = []
    for moment, outcome, ttft_ms in sorted(requests, key=lambda r: r[0]):
        now = moment
        window.record(Exchange(outcome, True, ttft_ms, ttft_ms), TARGETS, now)
        recorded.append((moment, outcome))
        assert len(window._buckets) <= 11
    summary = window.summary(now)
    surely_in = sum(moment > now - 90 for moment, _ in recorded)
    maybe_in = sum(moment > now - 100 for moment, _ in recorded)
    assert surely_in <= summary.outcomes.total <= maybe_in
    assert summary.attained <= summary.judged <= summary.outcomes.total
