"""The monitor's report, from what it holds at one moment. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from npufleet_api.contract import AdminState
from npufleet_api.report import Alert, DataState, EngineFigures, MonitorReport, Utilisation
from npufleet_api.settings import MonitorSettings
from npufleet_monitor.collectors.engine import EngineSample
from npufleet_monitor.collectors.npu_exporter import NpuFigures
from npufleet_monitor.settings import Identity
from npufleet_monitor.window import WindowFigures

MAX_COUNT = 10**15
MAX_RATE = 10**9
MAX_SECONDS = 10**7


@dataclass(frozen=True, slots=True)
class Readings:
    """The latest of each source; None until it answered once."""

    state: AdminState | None = None
    sample: EngineSample | None = None
    window: WindowFigures = field(default_factory=WindowFigures)
    npus: NpuFigures = field(default_factory=NpuFigures)
    data: DataState = DataState.NO_DATA
    engine_age_seconds: float | None = None


def data_state(*, state_ok: bool, metrics_ok: bool, answered_before: bool) -> DataState:
    """State of the engine's figures after a scrape of its state and of its metrics.

    Without the state there are no figures: Stale if there were some, else NoData. With the state alone they are Partial.
    """
    if state_ok:
        return DataState.FRESH if metrics_ok else DataState.PARTIAL
    return DataState.STALE if answered_before else DataState.NO_DATA


def utilisation(readings: Readings) -> Utilisation:
    """How much of the replica is in use."""
    sample = readings.sample
    return Utilisation(
        compute_percent=readings.npus.compute_percent,
        memory_percent=readings.npus.memory_percent,
        kv_cache_percent=sample.kv_cache_percent if sample else None,
        pipeline_stall_percent=sample.stall_percent if sample else None,
    )


def engine_figures(readings: Readings) -> EngineFigures | None:
    """The engine's figures; None until it told its state. Values beyond what a report may hold are cut to it."""
    state, sample, window = readings.state, readings.sample or EngineSample(), readings.window
    if state is None:
        return None
    return EngineFigures(
        state=state.state,
        running=state.running,
        waiting=state.waiting,
        prompt_tokens_total=_count(sample.prompt_tokens),
        generation_tokens_total=_count(sample.generation_tokens),
        prompt_tokens_per_second=min(MAX_RATE, window.prompt_tokens_per_second or 0),
        generation_tokens_per_second=min(MAX_RATE, window.generation_tokens_per_second or 0),
        ttft_p50_ms=_bounded(window.ttft_p50_ms, 10**9),
        ttft_p95_ms=_bounded(window.ttft_p95_ms, 10**9),
        tpot_p50_ms=_bounded(window.tpot_p50_ms, 10**9),
        tpot_p95_ms=_bounded(window.tpot_p95_ms, 10**9),
        load_seconds=_bounded(sample.load_seconds, MAX_SECONDS),
        kv_cache_tokens=None if sample.kv_cache_tokens is None else _count(sample.kv_cache_tokens),
        prefill_tokens_per_second=_bounded(window.prefill_tokens_per_second, MAX_RATE),
        prefix_hit_percent=window.prefix_hit_percent,
        adapters=list(sample.adapters),
        max_running=None if sample.max_running is None else _count(sample.max_running),
    )


def build_report(identity: Identity, settings: MonitorSettings, readings: Readings, alerts: list[Alert], time_unix: float) -> MonitorReport:
    """The report of a monitor."""
    return MonitorReport(
        pod_name=identity.pod_name,
        pod_namespace=identity.pod_namespace,
        pod_uid=identity.pod_uid,
        pool=settings.pool,
        model_namespace=settings.model_namespace,
        model_name=settings.model_name,
        workload_class=settings.workload_class,
        time_unix=time_unix,
        data=readings.data,
        engine=engine_figures(readings),
        engine_age_seconds=_bounded(readings.engine_age_seconds, MAX_SECONDS),
        utilisation=utilisation(readings),
        alerts=alerts,
    )


def _count(value: float | None) -> int:
    return int(min(MAX_COUNT, value or 0))


def _bounded(value: float | None, highest: float) -> float | None:
    return None if value is None else min(highest, value)
