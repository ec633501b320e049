"""Reports of monitors and gateways. They are untrusted input: every field is bounded, and a bad report counts as no data, never as zero."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from npufleet_api.contract import EngineState

MAX_MONITOR_REPORT_BYTES = 256 * 1024
MAX_GATEWAY_REPORT_BYTES = 16 * 1024 * 1024
SCHEMA_VERSION = 1

Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
ShortText = Annotated[str, StringConstraints(max_length=512)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[float, Field(ge=0, le=10**7, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]
UnixTime = Annotated[float, Field(ge=0, le=10**11, allow_inf_nan=False)]
PercentFloat = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=10**9, allow_inf_nan=False)]


class ReportError(ValueError):
    """A report that cannot be used; the message says which field and why."""


class DataState(StrEnum):
    """How far a figure can be trusted. `Zero` is a measurement; the first three are not."""

    NO_DATA = "NoData"
    STALE = "Stale"
    PARTIAL = "Partial"
    ZERO = "Zero"
    FRESH = "Fresh"


class ReportModel(BaseModel):
    """A frozen part of a report. Unknown fields are ignored, so that a newer sender is understood."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Alert(ReportModel):
    """One alert that a monitor raises."""

    name: Name
    severity: Annotated[str, Field(pattern="^(info|warning|critical)$")]
    message: ShortText
    since_unix: UnixTime


class Utilisation(ReportModel):
    """How much of a replica is in use; None where the device does not tell."""

    compute_percent: PercentFloat | None = None
    memory_percent: PercentFloat | None = None
    kv_cache_percent: PercentFloat | None = None
    pipeline_stall_percent: PercentFloat | None = None


class EngineFigures(ReportModel):
    """What the monitor read from its engine."""

    state: EngineState
    running: Count = 0
    waiting: Count = 0
    prompt_tokens_total: Count = 0
    generation_tokens_total: Count = 0
    prompt_tokens_per_second: Rate = 0
    generation_tokens_per_second: Rate = 0
    ttft_p50_ms: Milliseconds | None = None
    ttft_p95_ms: Milliseconds | None = None
    tpot_p50_ms: Milliseconds | None = None
    tpot_p95_ms: Milliseconds | None = None
    load_seconds: Seconds | None = None
    max_running: Count | None = None
    """Requests that the engine runs at once at most, where it tells."""
    kv_cache_tokens: Count | None = None
    """Tokens that the KV cache holds on the device and in host memory; None where the engine does not tell."""
    prefill_tokens_per_second: Rate | None = None
    """Prompt tokens computed, those found in the prefix cache left out, over the seconds that requests spent in prefill."""
    prefix_hit_percent: PercentFloat | None = None
    """Prompt tokens found in the prefix cache, of those sought, in the last minute."""
    adapters: list[Name] = Field(default=[], max_length=64)
    """Adapters that are loaded."""


class MonitorReport(ReportModel):
    """`GET /report` of a monitor."""

    schema_version: Annotated[int, Field(ge=1, le=1000)] = SCHEMA_VERSION
    pod_name: Name
    pod_namespace: Name
    pod_uid: Name
    pool: Name
    model_namespace: Name
    model_name: Name
    workload_class: Name
    time_unix: UnixTime
    data: DataState
    """State of `engine`: Fresh, Stale when the last scrape failed, NoData when none succeeded yet."""
    engine: EngineFigures | None = None
    engine_age_seconds: Seconds | None = None
    utilisation: Utilisation = Utilisation()
    alerts: list[Alert] = Field(default=[], max_length=64)


class ReplicaReport(ReportModel):
    """One replica as the gateway sees it."""

    pod_name: Name
    pod_uid: Name
    ready: bool
    draining: bool
    in_flight: Count = 0
    report: MonitorReport | None = None
    report_age_seconds: Seconds | None = None
    report_error: ShortText | None = None
    breaker: Annotated[str, Field(pattern="^(closed|open|half_open)$")] = "closed"
    """The gateway's circuit breaker."""


class Outcomes(ReportModel):
    """Requests by how they ended, over the window. A client that leaves is `cancelled`; it is judged only if its TTFT target had passed."""

    ok: Count = 0
    client_error: Count = 0
    server_error: Count = 0
    timeout: Count = 0
    no_replica: Count = 0
    overloaded: Count = 0
    """429s for lack of capacity: a full queue, or a deadline that passed in it."""
    interrupted: Count = 0
    cancelled: Count = 0

    @property
    def total(self) -> int:
        """All requests of the window."""
        return self.ok + self.client_error + self.cancelled + self.failed

    @property
    def failed(self) -> int:
        """Requests that npufleet failed: the client's own errors and departures are not among them."""
        return self.server_error + self.timeout + self.no_replica + self.overloaded + self.interrupted


class TrafficBucket(ReportModel):
    """Requests of one stretch of time, by their arrival; tokens as far as they are known."""

    arrivals: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0


class TrafficHistory(ReportModel):
    """Traffic of the past in stretches of equal length, for forecasts. Whole stretches only, oldest first."""

    bucket_seconds: Annotated[float, Field(ge=1, le=86400, allow_inf_nan=False)]
    end_unix: UnixTime
    """When the last stretch ended."""
    buckets: list[TrafficBucket] = Field(default=[], max_length=512)


class WindowAttainment(ReportModel):
    """Requests that count towards attainment, and that attained, in the latest `window_seconds`."""

    window_seconds: Seconds
    judged: Count = 0
    attained: Count = 0


class TrafficFigures(ReportModel):
    """What is counted of requests in one window."""

    outcomes: Outcomes = Outcomes()
    judged: Count = 0
    """Requests that count towards attainment."""
    attained: Count = 0
    in_flight: Count = 0
    ttft_p50_ms: Milliseconds | None = None
    ttft_p95_ms: Milliseconds | None = None
    tpot_p50_ms: Milliseconds | None = None
    tpot_p95_ms: Milliseconds | None = None
    duration_p50_ms: Milliseconds | None = None
    """End to end."""
    duration_p95_ms: Milliseconds | None = None


class ClassTraffic(TrafficFigures):
    """The requests of one class among a model's traffic, in the same window."""

    workload_class: Name
    windows: list[WindowAttainment] = Field(default=[], max_length=8)


class EngineTotals(ReportModel):
    """The monitors' reports of a model's replicas, added up. Replicas without a usable report are in `replicas` only."""

    replicas: Count = 0
    reporting: Count = 0
    oldest_age_seconds: Seconds | None = None
    """Age of the oldest figures among them, the monitor's own delay included."""
    running: Count = 0
    waiting: Count = 0
    prompt_tokens_per_second: Rate = 0
    generation_tokens_per_second: Rate = 0
    kv_cache_mean_percent: PercentFloat | None = None
    kv_cache_max_percent: PercentFloat | None = None
    compute_mean_percent: PercentFloat | None = None


class ModelTraffic(TrafficFigures):
    """One model's traffic, as its clients saw it at this gateway."""

    namespace: Name
    name: Name
    served_name: Name
    workload_class: Name
    window_seconds: Seconds
    held: Count = 0
    """Requests that wait for a first replica: demand of a model that is scaled to zero."""
    last_request_age_seconds: Seconds | None = None
    """Since a request last arrived or ended; None if none did since the gateway started."""
    history: TrafficHistory | None = None
    windows: list[WindowAttainment] = Field(default=[], max_length=8)
    """Attainment in other windows than `window_seconds`."""
    classes: list[ClassTraffic] = Field(default=[], max_length=64)
    """The same traffic by the class that each request was given."""
    engines: EngineTotals = EngineTotals()
    replicas: list[ReplicaReport] = Field(default=[], max_length=1024)


class GatewayReport(ReportModel):
    """`GET /report` of a gateway."""

    schema_version: Annotated[int, Field(ge=1, le=1000)] = SCHEMA_VERSION
    gateway: Name
    pool: Name
    time_unix: UnixTime
    view_age_seconds: Seconds
    """Age of the gateway's view of models and pods; it grows while the API server is away."""
    uptime_seconds: Seconds | None = None
    """Since the gateway began to count: a window that is longer has not been seen whole."""
    models: list[ModelTraffic] = Field(default=[], max_length=4096)


R = TypeVar("R", bound=ReportModel)


def parse_monitor_report(raw: bytes) -> MonitorReport:
    """Parse a monitor's answer. Raises ReportError."""
    return _parse(MonitorReport, raw, MAX_MONITOR_REPORT_BYTES)


def parse_gateway_report(raw: bytes) -> GatewayReport:
    """Parse a gateway's answer. Raises ReportError."""
    return _parse(GatewayReport, raw, MAX_GATEWAY_REPORT_BYTES)


def _parse(kind: type[R], raw: bytes, limit: int) -> R:
    if len(raw) > limit:
        raise ReportError(f"report has {len(raw)} bytes, at most {limit} are read")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "report"
        raise ReportError(f"{where}: {first['msg']}") from error
