"""Clients, engines, monitors and a gateway for the stand-in cluster: reports of a load, as the operator would get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npufleet_api.contract import EngineState
from npufleet_api.model import AscendModelSpec
from npufleet_api.report import (
    DataState,
    EngineFigures,
    GatewayReport,
    ModelTraffic,
    MonitorReport,
    Outcomes,
    ReplicaReport,
    TrafficHistory,
    Utilisation,
)
from npufleet_operator.core.observed import ModelView, PodView, TrafficView
from support.fleet import Fleet, model_spec, pool_spec

TTFT_TARGET_MS = 1000
TPOT_TARGET_MS = 50
WINDOW_SECONDS = 60.0


@dataclass(frozen=True)
class Load:
    """What clients ask of one model, and what its replicas can do."""

    in_flight: int
    """Requests in flight at once, over all replicas."""
    capacity: int = 10
    """Requests in flight that one replica carries with every target just met."""
    base_tpot_ms: float = 10.0
    """Time per token of a request that is alone: above the target, no number of replicas helps."""
    percents: tuple[int, ...] = ()
    """Percent of requests within the targets with 1, 2, ... replicas that serve, the last for more; half of them where a target is
    missed, unless given."""


def elastic_spec(workload_class: str = "chat", least: int = 1, most: int = 8, **changes: Any) -> AscendModelSpec:
    """A model that follows its load."""
    slo = {"ttftMilliseconds": TTFT_TARGET_MS, "tpotMilliseconds": TPOT_TARGET_MS}
    scaling = {"minReplicas": least, "maxReplicas": most, **changes.pop("scaling", {})}
    return model_spec(workload_class, None, **{"slo": slo, "scaling": scaling, **changes})


def put_load(fleet: Fleet, loads: Mapping[str, Load], data: DataState = DataState.FRESH) -> None:
    """The fleet's gateway reports these loads of its models from now on, spread evenly over the replicas that are ready."""
    models = [_traffic(fleet, model, loads.get(model.name, Load(0))) for model in fleet.models.values()]
    report = GatewayReport(
        gateway="gateway-0", pool="prod", time_unix=fleet.now.timestamp(), view_age_seconds=0, uptime_seconds=3600, models=models
    )
    fleet.traffic = TrafficView(data, (report,))


def run(fleet: Fleet, loads: Mapping[str, Load], seconds: int, step: float = 5.0) -> list[Any]:
    """Plan after plan under a constant load; returns the plans."""
    plans = []
    for _ in range(int(seconds / step)):
        put_load(fleet, loads)
        plans.append(fleet.step(step))
    put_load(fleet, loads)
    return plans


def loaded(in_flight: int, seconds: int = 60, **spec: Any) -> Fleet:
    """One elastic model `tiny`, alone in its pool, that has had this load for a while."""
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", elastic_spec(**spec))
    run(fleet, {}, 15)
    run(fleet, {"tiny": Load(in_flight)}, seconds)
    return fleet


def _traffic(fleet: Fleet, model: ModelView, load: Load) -> ModelTraffic:
    pods = [pod for pod in fleet.of(model.name, model.namespace) if pod.engine_ready and pod.drain_started is None and not pod.terminating]
    served = load.in_flight if pods else 0
    each = [served // len(pods) + (index < served % len(pods)) for index in range(len(pods))]
    met = all(_tpot(load, count) <= TPOT_TARGET_MS for count in each)
    judged = 100 if load.in_flight and pods else 0
    percent = load.percents[min(len(pods), len(load.percents)) - 1] if load.percents and pods else 100 if met else 50
    return ModelTraffic(
        namespace=model.namespace,
        name=model.name,
        served_name=model.served_name,
        workload_class=model.spec.workload_class if model.spec else "chat",
        window_seconds=WINDOW_SECONDS,
        outcomes=Outcomes(ok=judged),
        judged=judged,
        attained=judged * percent // 100,
        in_flight=served,
        held=load.in_flight - served,
        last_request_age_seconds=0 if load.in_flight else 3600,
        history=TrafficHistory(bucket_seconds=60, end_unix=fleet.now.timestamp()),
        replicas=[replica_report(model, pod, load, count) for pod, count in zip(pods, each, strict=True)],
    )


def _tpot(load: Load, in_flight: int) -> float:
    """Linear in the batch, and at the target where the batch is the capacity."""
    return load.base_tpot_ms + (TPOT_TARGET_MS - load.base_tpot_ms) * in_flight / load.capacity


def replica_report(model: ModelView, pod: PodView, load: Load, in_flight: int, **engine: Any) -> ReplicaReport:
    """One replica with so many requests in flight."""
    running = min(in_flight, 4 * load.capacity)
    figures: dict[str, Any] = {
        "state": EngineState.READY,
        "running": running,
        "waiting": in_flight - running,
        "generation_tokens_per_second": running * 1000 / _tpot(load, running) if running else 0,
        "ttft_p50_ms": 100 if in_flight else None,
        "ttft_p95_ms": 200 if in_flight else None,
        "tpot_p95_ms": _tpot(load, running) if in_flight else None,
        "load_seconds": 5,
        **engine,
    }
    report = MonitorReport(
        pod_name=pod.name,
        pod_namespace=pod.namespace,
        pod_uid=pod.uid,
        pool="prod",
        model_namespace=model.namespace,
        model_name=model.name,
        workload_class="chat",
        time_unix=0,
        data=DataState.FRESH,
        engine=EngineFigures(**figures),
        engine_age_seconds=1,
        utilisation=Utilisation(kv_cache_percent=min(100.0, 25.0 * running / load.capacity)),
    )
    return ReplicaReport(
        pod_name=pod.name, pod_uid=pod.uid, ready=True, draining=False, in_flight=in_flight, report=report, report_age_seconds=1
    )
