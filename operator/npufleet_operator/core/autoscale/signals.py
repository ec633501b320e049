"""One model's signals, taken from the reports that can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_api.report import DataState, GatewayReport, ModelTraffic, MonitorReport, TrafficHistory
from npufleet_operator.core.measured import Measured
from npufleet_operator.core.observed import ModelKey, PodView

REPORT_STALE_SECONDS = 60.0
"""A replica's report older than this says nothing of the present load."""
MIN_JUDGED = 10
"""Fewer judged requests than this say nothing of attainment."""
PROMPT_TOKENS_PER_GENERATED = 4
"""Prompt tokens that cost about as much as one generated token, for the work of a request. A prompt is computed in parallel and bound by
compute, a generated token by reading the weights, shared by the batch: the ratio lies between 3 and 12 for 7B to 14B models on a 910B3
(313 TFLOPS, 1.6 TB/s) with batches of 32 down to 8; the lower end overrates prompts, hence demand."""


@dataclass(frozen=True, slots=True)
class ReplicaSignals:
    """One ready replica, by its own monitor and the gateways."""

    uid: str
    in_flight: int
    running: int
    waiting: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    compute: float | None
    kv_cache: float | None
    """Shares in use, from 0 to 1; None where the device does not tell."""
    work_per_second: float
    load_seconds: float | None


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of one model's load and service."""

    data: DataState
    ready: int
    replicas: tuple[ReplicaSignals, ...] = ()
    """Ready replicas with a report of the present."""
    attainment: float | None = None
    """Share of judged requests that met every target, from 0 to 1, lately: in the shortest window with enough of them."""
    judged: int = 0
    lasting: float | None = None
    """The same share in the gateways' own window, of minutes; None where too few requests were judged."""
    judged_per_second: float = 0.0
    """In that window."""
    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None
    """In that window, at the worst gateway."""
    failed_for_capacity: int = 0
    window_seconds: float = 0.0
    in_flight: int = 0
    """Requests of clients, those that wait for a first replica included."""
    idle_seconds: float = 0.0
    """Since the last request, as far as the gateways have looked back."""
    work: tuple[float, ...] = ()
    """Work per second in stretches of the past, oldest first."""
    bucket_seconds: float = 0.0

    @property
    def load(self) -> float:
        """Requests in flight per ready replica."""
        return self.in_flight / self.ready if self.ready else float(self.in_flight)


def work_of(prompt_tokens: float, generated_tokens: float) -> float:
    """Work in generated tokens, prompts weighed."""
    return generated_tokens + prompt_tokens / PROMPT_TOKENS_PER_GENERATED


def signals(measured: Measured, key: ModelKey, ready: Sequence[PodView]) -> Signals:
    """The model's signals. `ready` are the replicas that take new work now: what other pods are said to do is not counted."""
    parts = measured.of(key)
    if not parts:
        return Signals(DataState.NO_DATA if measured.data is not DataState.STALE else DataState.STALE, len(ready))
    traffic = [part for _, part in parts]
    replicas = _replicas(key, traffic, {pod.uid for pod in ready}, measured)
    window_seconds, judged, attained = _attainment(traffic)
    lasting, judged_per_second = _lasting(traffic)
    in_flight = sum(part.in_flight for part in traffic)
    held = sum(part.held for part in traffic)
    requests = sum(part.outcomes.total for part in traffic)
    state = DataState.PARTIAL if len(parts) < len(measured.reports) else measured.data
    if state is DataState.FRESH and len(replicas) < len(ready):
        state = DataState.PARTIAL
    if state is DataState.FRESH and requests == 0 and in_flight + held == 0:
        state = DataState.ZERO
    work, bucket_seconds = _history([part.history for part in traffic if part.history is not None])
    return Signals(
        data=state,
        ready=len(ready),
        replicas=replicas,
        attainment=min(1.0, attained / judged) if judged else None,
        judged=judged,
        lasting=lasting,
        judged_per_second=judged_per_second,
        ttft_p95_ms=max((part.ttft_p95_ms for part in traffic if part.ttft_p95_ms is not None), default=None),
        tpot_p95_ms=max((part.tpot_p95_ms for part in traffic if part.tpot_p95_ms is not None), default=None),
        failed_for_capacity=sum(part.outcomes.no_replica + part.outcomes.overloaded for part in traffic),
        window_seconds=window_seconds,
        in_flight=max(in_flight, held),
        idle_seconds=min(_idle_seconds(report, part) for report, part in parts),
        work=work,
        bucket_seconds=bucket_seconds,
    )


def _attainment(traffic: Sequence[ModelTraffic]) -> tuple[float, int, int]:
    """Length, judged and attained requests of the shortest window in which enough were judged; of the longest where none has enough."""
    windows: dict[float, tuple[int, int]] = {}
    for part in traffic:
        own = {window.window_seconds: (window.judged, window.attained) for window in part.windows}
        for seconds, (judged, attained) in {**own, part.window_seconds: (part.judged, part.attained)}.items():
            before = windows.get(seconds, (0, 0))
            windows[seconds] = (before[0] + judged, before[1] + attained)
    seconds = next((s for s in sorted(windows) if windows[s][0] >= MIN_JUDGED), max(windows))
    return (seconds, *windows[seconds])


def _lasting(traffic: Sequence[ModelTraffic]) -> tuple[float | None, float]:
    judged = sum(part.judged for part in traffic)
    rate = sum(part.judged / part.window_seconds for part in traffic if part.window_seconds > 0)
    return (min(1.0, sum(part.attained for part in traffic) / judged) if judged >= MIN_JUDGED else None), rate


def _idle_seconds(report: GatewayReport, part: ModelTraffic) -> float:
    if part.in_flight or part.held:
        return 0.0
    if part.last_request_age_seconds is not None:
        return part.last_request_age_seconds
    if part.outcomes.total:
        return 0.0
    return report.uptime_seconds if report.uptime_seconds is not None else part.window_seconds


def _replicas(key: ModelKey, traffic: Sequence[ModelTraffic], ready: set[str], measured: Measured) -> tuple[ReplicaSignals, ...]:
    """The youngest report of each ready replica; one that speaks of another model or pod is not believed."""
    best: dict[str, tuple[float, MonitorReport]] = {}
    for part in traffic:
        for replica in part.replicas:
            report, age = replica.report, replica.report_age_seconds or 0.0
            if replica.pod_uid not in ready or report is None or report.engine is None:
                continue
            if (report.model_namespace, report.model_name) != key or report.pod_uid != replica.pod_uid:
                continue
            age += report.engine_age_seconds or 0.0
            if age > REPORT_STALE_SECONDS or report.data in (DataState.STALE, DataState.NO_DATA):
                continue
            if replica.pod_uid not in best or age < best[replica.pod_uid][0]:
                best[replica.pod_uid] = (age, report)
    return tuple(_replica(report, measured.in_flight.get(uid, 0)) for uid, (_, report) in sorted(best.items()))


def _replica(report: MonitorReport, in_flight: int) -> ReplicaSignals:
    engine, use = report.engine, report.utilisation
    if engine is None:
        raise ValueError("engine: missing from a report that was chosen for its figures")
    return ReplicaSignals(
        uid=report.pod_uid,
        in_flight=in_flight,
        running=engine.running,
        waiting=engine.waiting,
        ttft_p50_ms=engine.ttft_p50_ms,
        ttft_p95_ms=engine.ttft_p95_ms,
        tpot_p50_ms=engine.tpot_p50_ms,
        tpot_p95_ms=engine.tpot_p95_ms,
        compute=None if use.compute_percent is None else use.compute_percent / 100,
        kv_cache=None if use.kv_cache_percent is None else use.kv_cache_percent / 100,
        work_per_second=work_of(engine.prompt_tokens_per_second, engine.generation_tokens_per_second),
        load_seconds=engine.load_seconds,
    )


def _history(parts: Sequence[TrafficHistory]) -> tuple[tuple[float, ...], float]:
    """Work per second, gateways added up from the last stretch backwards. Gateways that count in other stretches than the first are
    left out: the forecast is a floor, and too low a floor takes nothing away."""
    if not parts:
        return (), 0.0
    seconds = parts[0].bucket_seconds
    alike = [part.buckets for part in parts if part.bucket_seconds == seconds]
    length = max(len(buckets) for buckets in alike)
    total = [0.0] * length
    for buckets in alike:
        for offset, bucket in enumerate(reversed(buckets)):
            total[length - 1 - offset] += work_of(bucket.prompt_tokens, bucket.generated_tokens) / seconds
    return tuple(total), seconds
