"""The gateway's report, from what it holds at one moment. Reads no clock but the accounting's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npufleet_api.accounting import Accounting
from npufleet_api.report import ClassTraffic, DataState, EngineTotals, GatewayReport, ModelTraffic, MonitorReport, ReplicaReport
from npufleet_gateway.balancer import Balancer
from npufleet_gateway.routing import ModelKey, ModelRoute, Replica, ReplicaState, RoutingTable

MAX_MODELS = 4096
MAX_REPLICAS = 1024
MAX_COUNT = 10**15
MAX_RATE = 10**9

MonitorState = tuple[MonitorReport | None, float | None, str | None]
"""A replica's report, its age in seconds, and what is wrong with it."""


def build_report(
    *,
    gateway: str,
    pool: str,
    time_unix: float,
    view_age_seconds: float,
    table: RoutingTable,
    accounting: Accounting,
    balancer: Balancer,
    monitor: Callable[[str], MonitorState],
    held: Callable[[ModelKey], int] = lambda _: 0,
) -> GatewayReport:
    """The report of a gateway; models and replicas beyond what a report may hold are left out."""
    return GatewayReport(
        gateway=gateway,
        pool=pool,
        time_unix=time_unix,
        view_age_seconds=view_age_seconds,
        uptime_seconds=accounting.uptime_seconds,
        models=[_model(route, accounting, balancer, monitor, held(route.model.key)) for route in table.routes[:MAX_MODELS]],
    )


def _model(
    route: ModelRoute, accounting: Accounting, balancer: Balancer, monitor: Callable[[str], MonitorState], held: int
) -> ModelTraffic:
    model = route.model
    traffic = accounting.summary(model.key)
    states = [monitor(replica.pod_uid) for replica in route.replicas[:MAX_REPLICAS]]
    return ModelTraffic(
        namespace=model.namespace,
        name=model.name,
        served_name=model.served_name,
        workload_class=model.workload_class,
        window_seconds=traffic.window_seconds,
        **traffic.figures(),
        held=held,
        windows=accounting.windows(model.key),
        classes=_classes(model.key, accounting),
        last_request_age_seconds=accounting.last_request_age_seconds(model.key),
        history=accounting.history(model.key),
        engines=engine_totals(states),
        replicas=[_replica(replica, balancer, state) for replica, state in zip(route.replicas, states, strict=False)],
    )


def _classes(key: ModelKey, accounting: Accounting) -> list[ClassTraffic]:
    return [
        ClassTraffic(
            workload_class=name,
            **traffic.figures(),
            windows=accounting.windows(key, name),
        )
        for name, traffic in accounting.classes(key).items()
    ]


def engine_totals(states: Sequence[MonitorState]) -> EngineTotals:
    """The replicas' reports added up. A report whose figures are stale or missing counts as none."""
    usable = [
        (report, report.engine, (age or 0.0) + (report.engine_age_seconds or 0.0))
        for report, age, _ in states
        if report is not None and report.engine is not None and report.data not in (DataState.STALE, DataState.NO_DATA)
    ]
    kv = [r.utilisation.kv_cache_percent for r, _, _ in usable if r.utilisation.kv_cache_percent is not None]
    compute = [r.utilisation.compute_percent for r, _, _ in usable if r.utilisation.compute_percent is not None]
    return EngineTotals(
        replicas=len(states),
        reporting=len(usable),
        oldest_age_seconds=max((age for _, _, age in usable), default=None),
        running=min(MAX_COUNT, sum(engine.running for _, engine, _ in usable)),
        waiting=min(MAX_COUNT, sum(engine.waiting for _, engine, _ in usable)),
        prompt_tokens_per_second=min(MAX_RATE, sum(engine.prompt_tokens_per_second for _, engine, _ in usable)),
        generation_tokens_per_second=min(MAX_RATE, sum(engine.generation_tokens_per_second for _, engine, _ in usable)),
        kv_cache_mean_percent=min(100.0, sum(kv) / len(kv)) if kv else None,
        kv_cache_max_percent=max(kv, default=None),
        compute_mean_percent=min(100.0, sum(compute) / len(compute)) if compute else None,
    )


def _replica(replica: Replica, balancer: Balancer, monitor: MonitorState) -> ReplicaReport:
    report, age_seconds, error = monitor
    return ReplicaReport(
        pod_name=replica.pod_name,
        pod_uid=replica.pod_uid,
        ready=replica.ready,
        draining=replica.state in (ReplicaState.DRAINING, ReplicaState.TERMINATING),
        in_flight=balancer.outstanding(replica.pod_uid),
        report=report,
        report_age_seconds=age_seconds,
        report_error=error,
        breaker=balancer.breaker_state(replica.pod_uid).value,
    )
