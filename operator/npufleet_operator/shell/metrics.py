"""The operator's own metrics, served on :9090/metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from npufleet_api.model import AscendModelStatus
from npufleet_api.pool import InferencePoolStatus

API_REQUESTS = Counter("npufleet_operator_api_requests", "Requests to the API server.", ["method", "code"])
APPLIES = Counter("npufleet_operator_applies", "Objects written.", ["kind", "action"])
PLAN_SECONDS = Histogram("npufleet_operator_plan_seconds", "Time of one plan.", ["pool"], buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1))
PLAN_CPU_SECONDS = Counter("npufleet_operator_plan_cpu_seconds", "Processor time of plans.", ["pool"])
STAGE_SECONDS = Histogram(
    "npufleet_operator_cycle_stage_seconds",
    "Time of each stage of a cycle: observe, plan, apply, publish.",
    ["pool", "stage"],
    buckets=(0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
CYCLES = Counter("npufleet_operator_cycles", "Observe, plan, apply cycles by result.", ["pool", "result"])
LAST_CYCLE = Gauge("npufleet_operator_last_cycle_timestamp_seconds", "When the pool was last planned and applied without error.", ["pool"])
DECISIONS = Counter("npufleet_operator_decisions", "Decisions by reason.", ["pool", "reason"])
RECORDED_PLANS = Counter("npufleet_operator_recorded_plans", "Plans offered to the recorder, by result.", ["pool", "result"])
WATCH_BEHIND = Gauge("npufleet_operator_watch_behind_objects", "Objects that a list knew and the watch did not deliver.", ["kind"])
CRD_FIELDS_MISSING = Gauge("npufleet_operator_crd_fields_missing", "Fields that the installed CRD lacks: upgrade it.", ["crd"])
GATEWAY_REPORTS = Counter("npufleet_operator_gateway_reports", "Reports asked of gateways, by result.", ["pool", "result"])
POOL_NPUS = Gauge("npufleet_pool_npus", "NPUs of a pool.", ["pool", "state"])
CLASS_NPUS = Gauge("npufleet_class_npus", "NPUs of a class.", ["pool", "workload_class", "state"])
MODEL_REPLICAS = Gauge("npufleet_model_replicas", "Replicas of a model.", ["namespace", "model", "state"])
MODEL_CAPACITY = Gauge(
    "npufleet_model_replica_capacity",
    "What one replica was seen to carry with every target met; 0 is not known yet.",
    ["namespace", "model", "unit"],
)
MODEL_HOLD = Gauge("npufleet_model_scaling_reason", "1 for the reason that elastic scaling gives now.", ["namespace", "model", "reason"])
MODEL_READY = Gauge("npufleet_model_ready", "1 while the model's condition Ready is True.", ["namespace", "model"])

REPLICA_STATES = ("desired", "running", "ready", "draining", "updated", "wanted", "forecast")
CAPACITY_UNITS = ("concurrency", "work_per_second", "load_seconds")
_published: dict[tuple[str, str], AscendModelStatus] = {}
"""What the series of each model show: a status that is the very same object is not shown again."""


def publish_pool(name: str, status: InferencePoolStatus) -> None:
    """Show a pool's ledger."""
    for state in ("nominal", "supply", "foreign", "allocated", "draining"):
        POOL_NPUS.labels(name, state).set(getattr(status, state))
    for entry in status.classes:
        for state in ("guaranteed", "ceiling", "used", "borrowed", "lent", "wanted", "draining", "pending"):
            CLASS_NPUS.labels(name, entry.name, state).set(getattr(entry, state))


def publish_model(namespace: str, name: str, status: AscendModelStatus) -> None:
    """Show a model's replicas."""
    if _published.get((namespace, name)) is status:
        return
    _published[namespace, name] = status
    values = (
        status.desired_replicas,
        status.replicas,
        status.ready_replicas,
        status.draining_replicas,
        status.updated_replicas,
        status.scaling.wanted_replicas if status.scaling else status.desired_replicas,
        status.scaling.forecast_replicas if status.scaling else 0,
    )
    for state, value in zip(REPLICA_STATES, values, strict=True):
        MODEL_REPLICAS.labels(namespace, name, state).set(value)
    MODEL_HOLD.remove_by_labels({"namespace": namespace, "model": name})
    if status.scaling:
        MODEL_HOLD.labels(namespace, name, status.scaling.reason).set(1)
        for unit in CAPACITY_UNITS:
            MODEL_CAPACITY.labels(namespace, name, unit).set(getattr(status.scaling.capacity, unit))
    ready = status.condition("Ready")
    MODEL_READY.labels(namespace, name).set(int(ready is not None and ready.status == "True"))


def forget_model(namespace: str, name: str) -> None:
    """Drop the series of a model that is gone."""
    _published.pop((namespace, name), None)
    for state in REPLICA_STATES:
        MODEL_REPLICAS.remove(namespace, name, state)
    MODEL_READY.remove(namespace, name)
    for gauge in (MODEL_CAPACITY, MODEL_HOLD):
        gauge.remove_by_labels({"namespace": namespace, "model": name})


def forget_pool(name: str) -> None:
    """Drop the series of a pool that is gone."""
    POOL_NPUS.remove_by_labels({"pool": name})
    CLASS_NPUS.remove_by_labels({"pool": name})
