"""One model's traffic in a sliding window, as its clients saw it. Pure; memory is bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from npufleet_api.histogram import bin_of, percentiles
from npufleet_api.report import Outcomes
from npufleet_api.slo import Exchange, Judgement, Outcome, SloTargets, judge

WINDOW_SECONDS = 300.0
BUCKETS = 30


@dataclass(slots=True)
class _Bucket:
    start: float
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    judged: int = 0
    attained: int = 0
    ttft: dict[int, int] = field(default_factory=dict)
    tpot: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrafficSummary:
    """One model's window."""

    window_seconds: float
    outcomes: Outcomes = field(default_factory=Outcomes)
    judged: int = 0
    attained: int = 0
    in_flight: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None


class TrafficWindow:
    """One model's traffic. Buckets leave whole: the window covers between (BUCKETS - 1)/BUCKETS and all of its length."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS, buckets: int = BUCKETS) -> None:
        self._window_seconds = window_seconds
        self._bucket_seconds = window_seconds / buckets
        self._buckets: deque[_Bucket] = deque()
        self.in_flight = 0

    def record(self, exchange: Exchange, targets: SloTargets, now: float) -> Judgement:
        """Count a finished request."""
        self._expire(now)
        start = now - now % self._bucket_seconds
        if not self._buckets or self._buckets[-1].start < start:
            self._buckets.append(_Bucket(start))
        bucket = self._buckets[-1]
        bucket.outcomes[exchange.outcome] = bucket.outcomes.get(exchange.outcome, 0) + 1
        judgement = judge(exchange, targets)
        bucket.judged += judgement.judged
        bucket.attained += judgement.attained
        if exchange.ttft_ms is not None:
            index = bin_of(exchange.ttft_ms)
            bucket.ttft[index] = bucket.ttft.get(index, 0) + 1
        if exchange.tpot_ms is not None:
            index = bin_of(exchange.tpot_ms)
            bucket.tpot[index] = bucket.tpot.get(index, 0) + 1
        return judgement

    def summary(self, now: float) -> TrafficSummary:
        """Counts and percentiles of the window that ends now."""
        self._expire(now)
        outcomes = {outcome.value: sum(b.outcomes.get(outcome, 0) for b in self._buckets) for outcome in Outcome}
        ttft_p50, ttft_p95 = percentiles((b.ttft for b in self._buckets), (0.5, 0.95))
        tpot_p50, tpot_p95 = percentiles((b.tpot for b in self._buckets), (0.5, 0.95))
        return TrafficSummary(
            window_seconds=self._window_seconds,
            outcomes=Outcomes(**outcomes),
            judged=sum(b.judged for b in self._buckets),
            attained=sum(b.attained for b in self._buckets),
            in_flight=self.in_flight,
            ttft_p50_ms=ttft_p50,
            ttft_p95_ms=ttft_p95,
            tpot_p50_ms=tpot_p50,
            tpot_p95_ms=tpot_p95,
        )

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0].start + self._window_seconds <= now:
            self._buckets.popleft()
