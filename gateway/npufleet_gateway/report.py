"""The gateway's report, from what it holds at one moment. Pure."""

from __future__ import annotations

from collections.abc import Callable

from npufleet_api.report import GatewayReport, ModelTraffic, MonitorReport, ReplicaReport
from npufleet_api.traffic import TrafficSummary
from npufleet_gateway.routing import ModelKey, ModelRoute, Replica, ReplicaState, RoutingTable

MAX_MODELS = 4096
MAX_REPLICAS = 1024

MonitorState = tuple[MonitorReport | None, float | None, str | None]
"""A replica's report, its age in seconds, and what is wrong with it."""


def build_report(
    *,
    gateway: str,
    pool: str,
    time_unix: float,
    view_age_seconds: float,
    table: RoutingTable,
    traffic: Callable[[ModelKey], TrafficSummary],
    outstanding: Callable[[str], int],
    monitor: Callable[[str], MonitorState],
    held: Callable[[ModelKey], int] = lambda _: 0,
) -> GatewayReport:
    """The report of a gateway; models and replicas beyond what a report may hold are left out."""
    models = [_model(route, traffic(route.model.key), outstanding, monitor, held(route.model.key)) for route in table.routes[:MAX_MODELS]]
    return GatewayReport(gateway=gateway, pool=pool, time_unix=time_unix, view_age_seconds=view_age_seconds, models=models)


def _model(
    route: ModelRoute, traffic: TrafficSummary, outstanding: Callable[[str], int], monitor: Callable[[str], MonitorState], held: int
) -> ModelTraffic:
    model = route.model
    return ModelTraffic(
        namespace=model.namespace,
        name=model.name,
        served_name=model.served_name,
        workload_class=model.workload_class,
        window_seconds=traffic.window_seconds,
        outcomes=traffic.outcomes,
        judged=traffic.judged,
        attained=traffic.attained,
        in_flight=traffic.in_flight,
        held=held,
        ttft_p50_ms=traffic.ttft_p50_ms,
        ttft_p95_ms=traffic.ttft_p95_ms,
        tpot_p50_ms=traffic.tpot_p50_ms,
        tpot_p95_ms=traffic.tpot_p95_ms,
        replicas=[_replica(replica, outstanding(replica.pod_uid), monitor(replica.pod_uid)) for replica in route.replicas[:MAX_REPLICAS]],
    )


def _replica(replica: Replica, in_flight: int, monitor: MonitorState) -> ReplicaReport:
    report, age_seconds, error = monitor
    return ReplicaReport(
        pod_name=replica.pod_name,
        pod_uid=replica.pod_uid,
        ready=replica.ready,
        draining=replica.state in (ReplicaState.DRAINING, ReplicaState.TERMINATING),
        in_flight=in_flight,
        report=report,
        report_age_seconds=age_seconds,
        report_error=error,
    )
