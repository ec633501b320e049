"""The operator's series of pools and models: what status says, and nothing of what is gone."""

from __future__ import annotations

from prometheus_client import REGISTRY

from npufleet_operator.shell import metrics
from support.fleet import Fleet, model_spec
from support.load import Load, elastic_spec, run


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def of(name: str, state: str) -> float | None:
    return value("npufleet_model_replicas", namespace="metrics", model=name, state=state)


def test_a_models_series_follow_its_status_and_end_with_it() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec("code", 3), namespace="metrics")
    fleet.settle()
    status = fleet.models[("metrics", "tiny")].status
    metrics.publish_model("metrics", "tiny", status)
    assert [of("tiny", state) for state in ("desired", "running", "ready", "draining")] == [3, 3, 3, 0]
    assert value("npufleet_model_ready", namespace="metrics", model="tiny") == 1
    assert value("npufleet_model_scaling_reason", namespace="metrics", model="tiny", reason="Pinned") == 1
    metrics.publish_model("metrics", "tiny", status.model_copy(update={"ready_replicas": 2}))
    assert of("tiny", "ready") == 2
    metrics.forget_model("metrics", "tiny")
    assert of("tiny", "ready") is None
    metrics.publish_model("metrics", "tiny", status)
    assert of("tiny", "ready") == 3, "a model that comes back, or is another pool's now, is shown again although its status is the same"
    metrics.forget_model("metrics", "tiny")


def test_only_the_present_reason_is_shown() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", elastic_spec("code"), namespace="metrics")
    run(fleet, {"tiny": Load(5)}, 30)
    status = fleet.models[("metrics", "tiny")].status
    assert status.scaling is not None
    metrics.publish_model("metrics", "tiny", status)
    held = status.model_copy(update={"scaling": status.scaling.model_copy(update={"reason": "HoldNoData"})})
    metrics.publish_model("metrics", "tiny", held)
    shown = {reason: value("npufleet_model_scaling_reason", namespace="metrics", model="tiny", reason=reason)
             for reason in (status.scaling.reason, "HoldNoData")}  # fmt: skip
    assert shown == {status.scaling.reason: None, "HoldNoData": 1}
    metrics.forget_model("metrics", "tiny")


def test_a_pools_ledger_is_shown_by_class_and_ends_with_it() -> None:
    fleet = Fleet()
    fleet.add_model("coder", model_spec("code", 8))
    fleet.settle()
    metrics.publish_pool("shown", fleet.pool_status)
    assert value("npufleet_pool_npus", pool="shown", state="supply") == 8
    borrowed = value("npufleet_class_npus", pool="shown", workload_class="code", state="borrowed")
    assert borrowed == next(entry.borrowed for entry in fleet.pool_status.classes if entry.name == "code") == 8
    metrics.forget_pool("shown")
    assert value("npufleet_pool_npus", pool="shown", state="supply") is None
