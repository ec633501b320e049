"""Traffic in sliding windows, as its clients saw it. Pure; memory is bounded.

Windows are made of buckets that leave whole: a window of n buckets covers between (n - 1)/n and all of its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from npufleet_api.histogram import bin_of, percentiles
from npufleet_api.report import Outcomes, TrafficFigures
from npufleet_api.slo import Exchange, Judgement, Outcome, SloTargets, judge

WINDOW_SECONDS = 300.0
BUCKETS = 30
PERCENTILES = (0.5, 0.95)


@dataclass(slots=True)
class _Bucket:
    start: float
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    judged: int = 0
    attained: int = 0
    ttft: dict[int, int] = field(default_factory=dict)
    tpot: dict[int, int] = field(default_factory=dict)
    duration: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrafficSummary:
    """One window, or several together."""

    window_seconds: float
    outcomes: Outcomes = field(default_factory=Outcomes)
    judged: int = 0
    attained: int = 0
    in_flight: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None
    duration_p50_ms: float | None = None
    duration_p95_ms: float | None = None

    def figures(self) -> dict[str, Any]:
        """The fields that a report shows of it, by name."""
        return {name: getattr(self, name) for name in TrafficFigures.model_fields}


class TrafficWindow:
    """The traffic of one model, or of one class of it. Times are seconds of one clock, and do not go back."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS, buckets: int = BUCKETS) -> None:
        self.window_seconds = window_seconds
        self._bucket_seconds = window_seconds / buckets
        self._buckets: deque[_Bucket] = deque()
        self.in_flight = 0

    def record(self, exchange: Exchange, targets: SloTargets, now: float, *, missed: bool = False) -> Judgement:
        """Count a finished request. With `missed` its miss was counted before (`miss`), and the judgement says that nothing is left to
        count.
        """
        bucket = self._bucket(now, now)
        bucket.outcomes[exchange.outcome] = bucket.outcomes.get(exchange.outcome, 0) + 1
        judgement = Judgement(judged=False) if missed else judge(exchange, targets)
        bucket.judged += judgement.judged
        bucket.attained += judgement.attained
        if exchange.ttft_ms is not None:
            _count(bucket.ttft, exchange.ttft_ms)
        if exchange.tpot_ms is not None:
            _count(bucket.tpot, exchange.tpot_ms)
        _count(bucket.duration, exchange.elapsed_ms)
        return judgement

    def miss(self, at: float, now: float) -> None:
        """Count a request that missed a target at `at`, not after `now`, and has not ended. A time before the window is not counted."""
        if at > now - self.window_seconds:
            self._bucket(at, now).judged += 1

    def summary(self, now: float) -> TrafficSummary:
        """Counts and percentiles of the window that ends now."""
        return summarise([self], self.window_seconds, now)

    def attainment(self, now: float, seconds: float) -> tuple[int, int]:
        """Requests judged, and attained, in the latest `seconds`, at most the window's length."""
        self._expire(now)
        latest = [bucket for bucket in self._buckets if bucket.start + min(seconds, self.window_seconds) > now]
        return sum(bucket.judged for bucket in latest), sum(bucket.attained for bucket in latest)

    def buckets(self, now: float) -> Sequence[_Bucket]:
        """What the window that ends now is made of."""
        self._expire(now)
        return self._buckets

    def _bucket(self, at: float, now: float) -> _Bucket:
        """The bucket of `at`, which is in the window."""
        self._expire(now)
        start = at - at % self._bucket_seconds
        position = len(self._buckets)
        while position and self._buckets[position - 1].start > start:
            position -= 1
        if position and self._buckets[position - 1].start == start:
            return self._buckets[position - 1]
        bucket = _Bucket(start)
        self._buckets.insert(position, bucket)
        return bucket

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0].start + self.window_seconds <= now:
            self._buckets.popleft()


class AttainmentWindow:
    """Only the counts of attainment, for a window that is too long to keep more of."""

    def __init__(self, window_seconds: float, buckets: int = BUCKETS) -> None:
        self.window_seconds = window_seconds
        self._bucket_seconds = window_seconds / buckets
        self._buckets: deque[tuple[float, int, int]] = deque()

    def count(self, now: float, judgement: Judgement) -> None:
        """Count a judgement of now."""
        if not judgement.judged:
            return
        start = now - now % self._bucket_seconds
        judged, attained = 1, int(judgement.attained)
        if self._buckets and self._buckets[-1][0] >= start:
            start, before, met = self._buckets.pop()
            judged, attained = judged + before, attained + met
        self._buckets.append((start, judged, attained))
        self._expire(now)

    def attainment(self, now: float) -> tuple[int, int]:
        """Requests judged, and attained."""
        self._expire(now)
        return sum(judged for _, judged, _ in self._buckets), sum(attained for _, _, attained in self._buckets)

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] + self.window_seconds <= now:
            self._buckets.popleft()


def summarise(windows: Iterable[TrafficWindow], window_seconds: float, now: float) -> TrafficSummary:
    """Windows of one length taken together."""
    windows = list(windows)
    buckets = [bucket for window in windows for bucket in window.buckets(now)]
    outcomes = {outcome.value: sum(bucket.outcomes.get(outcome, 0) for bucket in buckets) for outcome in Outcome}
    ttft_p50, ttft_p95 = percentiles((bucket.ttft for bucket in buckets), PERCENTILES)
    tpot_p50, tpot_p95 = percentiles((bucket.tpot for bucket in buckets), PERCENTILES)
    duration_p50, duration_p95 = percentiles((bucket.duration for bucket in buckets), PERCENTILES)
    return TrafficSummary(
        window_seconds=window_seconds,
        outcomes=Outcomes(**outcomes),
        judged=sum(bucket.judged for bucket in buckets),
        attained=sum(bucket.attained for bucket in buckets),
        in_flight=sum(window.in_flight for window in windows),
        ttft_p50_ms=ttft_p50,
        ttft_p95_ms=ttft_p95,
        tpot_p50_ms=tpot_p50,
        tpot_p95_ms=tpot_p95,
        duration_p50_ms=duration_p50,
        duration_p95_ms=duration_p95,
    )


def _count(histogram: dict[int, int], value: float) -> None:
    index = bin_of(value)
    histogram[index] = histogram.get(index, 0) + 1
