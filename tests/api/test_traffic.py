"""The sliding window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.slo import Exchange, Judgement, Outcome, SloTargets
from npufleet_api.traffic import AttainmentWindow, TrafficWindow, summarise

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


def test_a_miss_that_was_counted_before_the_end_is_not_judged_again() -> None:
    window = TrafficWindow(window_seconds=300, buckets=30)
    window.miss(1004, 1020)
    assert window.summary(1020).judged == 1
    judgement = window.record(ok(ttft_ms=5000), TARGETS, 1030, missed=True)
    assert not judgement.judged
    summary = window.summary(1030)
    assert (summary.judged, summary.attained, summary.outcomes.ok) == (1, 0, 1)
    window.miss(1, 1030)
    assert window.summary(1030).judged == 1
    assert window.summary(1300).judged == 0


moments = st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 150), st.booleans()), max_size=60)


@given(moments, st.floats(1, 100))
def test_attainment_counts_each_moment_in_its_bucket_whatever_the_order_of_the_misses(
    events: list[tuple[float, float, bool]], seconds: float
) -> None:
    window = TrafficWindow(window_seconds=100, buckets=10)
    counted: list[float] = []
    now = 0.0
    for moment, delay, early in sorted(events):
        now = moment
        if early:
            at = max(0.0, now - delay)
            window.miss(at, now)
            if at > now - 100:
                counted.append(at)
        else:
            window.record(ok(), TARGETS, now)
            counted.append(now)
    judged, attained = window.attainment(now, seconds)
    assert sum(moment > now - seconds + 10 for moment in counted) <= judged <= sum(moment > now - seconds - 10 for moment in counted)
    assert attained <= judged
    starts = [bucket.start for bucket in window.buckets(now)]
    assert starts == sorted(set(starts))
    assert len(starts) <= 12


@given(st.lists(st.tuples(st.floats(0, 20_000), st.booleans(), st.booleans()), max_size=60))
def test_the_long_window_counts_what_is_in_it(events: list[tuple[float, bool, bool]]) -> None:
    window = AttainmentWindow(3600, 30)
    now = 0.0
    counted = []
    for moment, judged, attained in sorted(events):
        now = moment
        window.count(now, Judgement(judged, judged and attained))
        if judged:
            counted.append((now, attained))
        assert len(window._buckets) <= 31
    found, met = window.attainment(now)
    assert sum(moment > now - 3480 for moment, _ in counted) <= found <= sum(moment > now - 3600 for moment, _ in counted)
    assert met <= sum(attained for moment, attained in counted if moment > now - 3600)
    assert window.attainment(now + 3600) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1, 1000)), min_size=1, max_size=40))
def test_windows_together_are_what_one_would_have_counted(requests: list[tuple[int, float]]) -> None:
    whole, parts = TrafficWindow(), [TrafficWindow() for _ in range(3)]
    for number, (part, ttft) in enumerate(requests):
        for window in (whole, parts[part]):
            window.record(ok(ttft), TARGETS, float(number))
    now = float(len(requests))
    assert summarise(parts, 300, now) == whole.summary(now)
