"""Rates and percentiles over a window of scrapes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from npufleet_monitor.collectors.engine import CumulativeHistogram, EngineSample

PERCENTILE_SECONDS = 60.0
RATE_SECONDS = 15.0
MAX_SAMPLES = 400
"""60 s at the shortest scrape interval (0.2 s), with room to spare."""


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """What the window says; None where it says nothing: too few scrapes, or no observation between them."""

    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None
    timeout_percent: float | None = None
    prefill_tokens_per_second: float | None = None
    prefix_hit_percent: float | None = None


class EngineWindow:
    """The scrapes of the last minute. A counter that went back means that the engine restarted: what was before is dropped."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, EngineSample]] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, sample: EngineSample) -> None:
        """Take a scrape; `now` in seconds of a monotonic clock."""
        if self._samples and restarted(self._samples[-1][1], sample):
            self._samples.clear()
        self._samples.append((now, sample))
        while self._samples[0][0] < now - PERCENTILE_SECONDS:
            self._samples.popleft()

    def figures(self) -> WindowFigures:
        """Figures from the first to the last scrape of the window."""
        if len(self._samples) < 2:
            return WindowFigures()
        end, last = self._samples[-1]
        _, first = self._samples[0]
        rate_start, rate_first = next((t, s) for t, s in self._samples if t >= end - RATE_SECONDS)
        seconds = end - rate_start
        ttft_p50, ttft_p95 = histogram_percentiles(first.ttft, last.ttft, (0.5, 0.95))
        tpot_p50, tpot_p95 = histogram_percentiles(first.tpot, last.tpot, (0.5, 0.95))
        return WindowFigures(
            prompt_tokens_per_second=_rate(rate_first.prompt_tokens, last.prompt_tokens, seconds),
            generation_tokens_per_second=_rate(rate_first.generation_tokens, last.generation_tokens, seconds),
            ttft_p50_ms=_milliseconds(ttft_p50),
            ttft_p95_ms=_milliseconds(ttft_p95),
            tpot_p50_ms=_milliseconds(tpot_p50),
            tpot_p95_ms=_milliseconds(tpot_p95),
            timeout_percent=_timeout_percent(first, last),
            prefill_tokens_per_second=_prefill_tokens_per_second(first, last),
            prefix_hit_percent=_prefix_hit_percent(first, last),
        )


def restarted(before: EngineSample, after: EngineSample) -> bool:
    """Whether a counter went back."""
    pairs = (
        (before.prompt_tokens, after.prompt_tokens),
        (before.generation_tokens, after.generation_tokens),
        (before.finished, after.finished),
        (before.timeouts, after.timeouts),
        (before.prefix_queries, after.prefix_queries),
        (before.prefix_hits, after.prefix_hits),
        (before.prefill_seconds, after.prefill_seconds),
        (before.ttft.total, after.ttft.total),
        (before.tpot.total, after.tpot.total),
    )
    return any(old is not None and new is not None and new < old for old, new in pairs)


def histogram_percentiles(first: CumulativeHistogram, last: CumulativeHistogram, shares: tuple[float, ...]) -> tuple[float | None, ...]:
    """Percentiles of what was observed between two scrapes, in the histogram's unit; linear within a bucket, as PromQL's
    histogram_quantile does it. Beyond the last bound it is the last bound. None where nothing was observed or the bounds changed.
    """
    if first.bounds and first.bounds != last.bounds:
        return tuple(None for _ in shares)
    old = first.counts if first.bounds else (0.0,) * len(last.bounds)
    observed = last.total - first.total
    if observed <= 0 or not last.bounds:
        return tuple(None for _ in shares)
    counts = [new - before for new, before in zip(last.counts, old, strict=True)]
    return tuple(_quantile(share * observed, last.bounds, counts) for share in shares)


def _quantile(rank: float, bounds: tuple[float, ...], counts: list[float]) -> float:
    below = 0.0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > below:
            return max(0.0, lower + (bound - lower) * (rank - below) / (count - below))
        below = max(below, count)
        lower = bound
    return max(0.0, bounds[-1])


def _rate(first: float | None, last: float | None, seconds: float) -> float | None:
    if first is None or last is None or seconds <= 0:
        return None
    return max(0.0, last - first) / seconds


def _timeout_percent(first: EngineSample, last: EngineSample) -> float | None:
    """Share of the requests that ended in the window which ran into a timeout; None if none ended."""
    if last.finished is None or last.timeouts is None:
        return None
    finished = last.finished - (first.finished or 0)
    timeouts = last.timeouts - (first.timeouts or 0)
    return min(100.0, max(0.0, timeouts) * 100 / finished) if finished > 0 else None


def _prefill_tokens_per_second(first: EngineSample, last: EngineSample) -> float | None:
    """Prompt tokens computed per second that a request spent in prefill; None if none was."""
    tokens, seconds = _growth(first.prompt_tokens, last.prompt_tokens), _growth(first.prefill_seconds, last.prefill_seconds)
    if tokens is None or not seconds:
        return None
    return max(0.0, tokens - (_growth(first.prefix_hits, last.prefix_hits) or 0.0)) / seconds


def _prefix_hit_percent(first: EngineSample, last: EngineSample) -> float | None:
    queries, hits = _growth(first.prefix_queries, last.prefix_queries), _growth(first.prefix_hits, last.prefix_hits)
    return None if not queries or hits is None else min(100.0, 100 * hits / queries)


def _growth(first: float | None, last: float | None) -> float | None:
    return None if last is None else max(0.0, last - (first or 0.0))


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
