"""Alerts by thresholds. Pure: what holds now, since when, given what held before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from npufleet_api.pool import AlertThresholds
from npufleet_api.report import Alert, DataState, Utilisation

MEMORY_HIGH = "MemoryHigh"
COMPUTE_HIGH = "ComputeHigh"
PIPELINE_STALL = "PipelineStall"
TIMEOUTS_HIGH = "TimeoutsHigh"
NPU_UNHEALTHY = "NpuUnhealthy"
ENGINE_UNREACHABLE = "EngineUnreachable"
NPU_METRICS_MISSING = "NpuMetricsMissing"

UNREACHABLE_AFTER_SECONDS = 10.0
"""A scrape that fails once says nothing; an engine that answers nothing for so long hangs or is overloaded."""
MAX_MESSAGE = 512


@dataclass(frozen=True, slots=True)
class Observation:
    """What alerts are judged by; None where it is not known, which raises nothing."""

    utilisation: Utilisation = field(default_factory=Utilisation)
    timeout_percent: float | None = None
    unhealthy_npus: tuple[str, ...] = ()
    data: DataState = DataState.NO_DATA
    engine_age_seconds: float | None = None
    npu_error: str | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that holds now."""

    name: str
    severity: str
    message: str


def conditions(seen: Observation, thresholds: AlertThresholds) -> list[Condition]:
    """What holds, most severe first."""
    use = seen.utilisation
    found: list[Condition] = []
    if seen.unhealthy_npus:
        listed = ", ".join(seen.unhealthy_npus)
        found.append(Condition(NPU_UNHEALTHY, "critical", f"NPU {listed} is reported unhealthy: see npu-smi info -t health on the node"))
    if seen.data is DataState.STALE and (seen.engine_age_seconds or 0) >= UNREACHABLE_AFTER_SECONDS:
        text = f"the engine has answered no scrape for {seen.engine_age_seconds:.0f} s"
        found.append(Condition(ENGINE_UNREACHABLE, "critical", text))
    for name, what, value, threshold in (
        (MEMORY_HIGH, "device memory in use", use.memory_percent, thresholds.memory_percent),
        (COMPUTE_HIGH, "compute in use", use.compute_percent, thresholds.compute_percent),
        (PIPELINE_STALL, "time that compute waited for its inputs", use.pipeline_stall_percent, thresholds.pipeline_stall_percent),
        (TIMEOUTS_HIGH, "requests that ran into a timeout", seen.timeout_percent, thresholds.timeout_percent),
    ):
        if value is not None and value >= threshold:
            found.append(Condition(name, "warning", f"{what}: {value:.1f} %, the threshold is {threshold} %"))
    if seen.npu_error is not None:
        found.append(Condition(NPU_METRICS_MISSING, "info", f"no figures of the NPUs: {seen.npu_error}"))
    return found


def raise_alerts(held: list[Condition], since_unix: Mapping[str, float], now_unix: float) -> list[Alert]:
    """Alerts of what holds; one that held before keeps its time."""
    return [
        Alert(name=c.name, severity=c.severity, message=c.message[:MAX_MESSAGE], since_unix=since_unix.get(c.name, now_unix)) for c in held
    ]
