"""What one replica of a model can do, learned from reports and kept in the model's status: it survives a restart of the operator."""

from __future__ import annotations

from collections.abc import Sequence

from npufleet_api.model import LearnedCapacity, Slo
from npufleet_api.report import DataState
from npufleet_operator.core.autoscale.prediction import measured, misses
from npufleet_operator.core.autoscale.signals import Signals
from npufleet_operator.core.measured import round_figure
from npufleet_operator.core.observed import PodView

LOAD_TOLERANCE = 0.3
"""A load time that differs by less than this share is no news: status shall not follow the noise."""
MAX_CONCURRENCY = 100_000
MAX_WORK = 10**9
MAX_LOAD_SECONDS = 86400


def learn(before: LearnedCapacity, s: Signals, ready: Sequence[PodView], slo: Slo | None) -> LearnedCapacity:
    """`before`, raised to what was carried with every target met, lowered to below what was not. Replicas with requests of which nothing
    is measured yet teach nothing."""
    concurrency, work = before.concurrency, before.work_per_second
    if s.replicas and all(measured(r, slo) or not r.running for r in s.replicas) and s.data in (DataState.FRESH, DataState.PARTIAL):
        carried = max(0, min(MAX_CONCURRENCY, int(s.load)))
        worked = min(MAX_WORK, round_figure(sum(r.work_per_second for r in s.replicas) / len(s.replicas)))
        if not any(misses(r, slo) for r in s.replicas):
            concurrency, work = max(concurrency, carried), max(work, worked)
        elif all(misses(r, slo) for r in s.replicas):
            # Fewer requests at once would have met the targets.
            if concurrency and carried > 1:
                concurrency = max(1, min(concurrency, carried - 1))
            if work and worked:
                work = min(work, worked)
    load_seconds = _load_seconds(before.load_seconds, s, ready)
    if (concurrency, work, load_seconds) == (before.concurrency, before.work_per_second, before.load_seconds):
        return before
    return LearnedCapacity(concurrency=concurrency, work_per_second=work, load_seconds=load_seconds)


def _load_seconds(before: int, s: Signals, ready: Sequence[PodView]) -> int:
    """From the pod's creation to ready, by the quickest replica: a replica that was unready in between looks slower than it was.
    Engines tell the part that they can see; what they tell is the least."""
    seen = [(pod.ready_since - pod.created).total_seconds() for pod in ready if pod.ready_since is not None and pod.engine_restarts == 0]
    told = [r.load_seconds for r in s.replicas if r.load_seconds is not None]
    least = max(told, default=0.0)
    latest = max(min((seconds for seconds in seen if seconds >= 0), default=0.0), least)
    if latest <= 0:
        return before
    latest = min(MAX_LOAD_SECONDS, latest)
    if before and abs(latest - before) <= LOAD_TOLERANCE * before:
        return before
    return max(1, round_figure(latest))
