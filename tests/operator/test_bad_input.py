"""What contradicts itself, cannot be, or lies: a condition or a counted refusal, never a crash, never a replica less."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.conditions import Reason
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus
from npufleet_api.report import DataState, GatewayReport, ReportError, parse_gateway_report
from npufleet_operator.core.observed import TrafficView
from npufleet_operator.core.plan import make_plan
from npufleet_operator.shell.parse import pool_view
from support.fleet import RESOURCE, START, Fleet, is_quiet, model_spec, node, pool_spec
from support.load import Load, loaded, put_load

CHAT = {"name": "chat", "priority": 3, "minPercent": 20, "maxPercent": 50}
CODE = {"name": "code", "priority": 1, "minPercent": 10}


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ([{**CHAT, "minPercent": 60}, CODE], ("spec.classes", "minPercent 60", "'chat'", "maxPercent 50", "lower or raise one")),
        ([{**CHAT, "minPercent": 50}, {**CODE, "minPercent": 51}], ("spec.classes", "add up to 101", "lower some")),
        ([CHAT, CODE, CHAT], ("spec.classes", "'chat' is there 2 times", "keep one")),
    ],
    ids=["guarantee above ceiling", "guarantees above 100 %", "a class twice"],
)
def test_classes_that_contradict_each_other_are_told_and_what_runs_is_kept(classes: list[dict[str, Any]], said: tuple[str, ...]) -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.settle()
    raw = {"metadata": {"name": "prod", "uid": "pool-uid"}, "spec": {"npus": {"resourceName": RESOURCE}, "classes": classes}}
    view = pool_view(raw)
    plan = make_plan(replace(fleet.observe(), pool=view), fleet.now)
    assert is_quiet(plan)
    assert plan.pool_status is not None
    accepted = plan.pool_status.condition("Accepted")
    assert accepted is not None
    assert (accepted.status, accepted.reason) == ("False", Reason.SPEC_REFUSED)
    assert all(words in accepted.message for words in said), accepted.message
    assert not plan.prune_owners
    assert plan.model_status[("team", "tiny")].condition("Accepted").reason == Reason.POOL_REFUSED  # type: ignore[union-attr]


@pytest.mark.parametrize("tensor", [1, 3])
def test_a_replica_of_part_of_a_unit_is_refused_with_the_next_whole_numbers(tensor: int) -> None:
    fleet = Fleet(pool=pool_spec(npus={"resourceName": RESOURCE, "unit": 2}))
    fleet.add_model("tiny", model_spec("code", parallelism={"tensor": tensor}))
    assert is_quiet(fleet.step())
    for kind in ("Accepted", "Ready"):
        status, reason, message = fleet.condition("tiny", kind)
        assert (status, reason) == ("False", Reason.PART_OF_UNIT)
        assert f"takes {tensor} NPU(s)" in message
        assert "whole units of 2 (npus.unit)" in message
        assert message.endswith("takes 2" if tensor == 1 else "takes 2 or 4")


def test_a_unit_that_grows_under_running_replicas_takes_none_of_them() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec("code", 3))
    fleet.settle()
    assert fleet.pool is not None
    fleet.pool = fleet.pool.model_copy(update={"npus": fleet.pool.npus.model_copy(update={"unit": 2})})
    for _ in range(10):
        assert is_quiet(fleet.step(30))
    assert fleet.condition("tiny", "Accepted")[1] == Reason.PART_OF_UNIT
    assert fleet.models[("team", "tiny")].status.ready_replicas == 3


def test_whole_units_are_served() -> None:
    fleet = Fleet(pool=pool_spec(npus={"resourceName": RESOURCE, "unit": 2}))
    fleet.add_model("tiny", model_spec("code", 2, parallelism={"tensor": 4}))
    fleet.settle()
    assert fleet.condition("tiny", "Ready")[0] == "True"


UNSERVABLE = {
    "no class": model_spec("missing", 2),
    "too big": model_spec("code", 2, parallelism={"tensor": 16}),
    "too big, in one stroke": model_spec("code", 2, parallelism={"tensor": 16}, rollout="Recreate"),
    "above the ceiling": model_spec("code", 2, parallelism={"tensor": 8}),
    "no room for one beside one": model_spec("code", 2, parallelism={"tensor": 4}),
}


@pytest.mark.parametrize("spec", UNSERVABLE.values(), ids=UNSERVABLE)
def test_a_change_that_cannot_be_served_takes_no_replica_away(spec: AscendModelSpec) -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "minPercent": 50}, {"name": "code", "maxPercent": 50}]))
    fleet.add_model("other", model_spec("chat", 4))
    fleet.add_model("tiny", model_spec("code", 2, parallelism={"tensor": 2}))
    fleet.settle()
    fleet.add_model("tiny", spec)
    for _ in range(10):
        assert is_quiet(fleet.step(30))
    assert sum(pod.engine_ready for pod in fleet.of("tiny")) == 2
    told = {kind: fleet.condition("tiny", kind)[0] for kind in ("Accepted", "CapacityAvailable")}
    assert "False" in told.values()


Change = Callable[[dict[str, Any]], object]


def _model(**changes: Any) -> Change:
    return lambda report: report["models"][0].update(changes)


def _replica(**changes: Any) -> Change:
    return lambda report: report["models"][0]["replicas"][0].update(changes)


def _engine(**changes: Any) -> Change:
    return lambda report: report["models"][0]["replicas"][0]["report"]["engine"].update(changes)


REFUSED: dict[str, Change] = {
    "negative requests": _model(in_flight=-1),
    "negative judged": _model(judged=-5),
    "huge requests": _model(in_flight=10**16),
    "huge latency": _model(ttft_p95_ms=1e30),
    "NaN latency": _model(tpot_p95_ms=float("nan")),
    "infinite latency": _engine(ttft_p95_ms=float("inf")),
    "negative rate": _engine(generation_tokens_per_second=-1.0),
    "huge rate": _engine(generation_tokens_per_second=1e20),
    "negative age": _replica(report_age_seconds=-1.0),
    "no such state": _engine(state="Asleep"),
    "time before 1970": lambda report: report.update(time_unix=-1.0),
    "ten million models": lambda report: report.update(models=report["models"] * 5000),
}


def reported() -> tuple[Fleet, GatewayReport]:
    """Four replicas under a load that needs them, and what their gateway reports."""
    fleet = loaded(35, 400)
    (report,) = fleet.traffic.reports
    return fleet, report


@pytest.mark.parametrize("lie", REFUSED.values(), ids=REFUSED)
def test_a_figure_that_cannot_be_is_refused_at_the_border_and_takes_nothing_away(lie: Change) -> None:
    fleet, report = reported()
    raw = json.loads(report.model_dump_json())
    lie(raw)
    with pytest.raises(ReportError):
        parse_gateway_report(json.dumps(raw).encode())
    fleet.traffic = TrafficView()
    for _ in range(30):
        assert is_quiet(fleet.step(10))


BELIEVED: dict[str, Change] = {
    "as many requests as can be said": _model(in_flight=10**15, judged=10**15, attained=0),
    "more attained than judged": _model(judged=1, attained=10**15),
    "the slowest that can be said": _engine(ttft_p95_ms=1e9, tpot_p95_ms=1e9),
    "no time at all": _engine(ttft_p95_ms=0.0, tpot_p95_ms=0.0),
    "another model": lambda report: [m.update(name="other") for m in report["models"]],
    "a monitor of another model": lambda report: [r["report"].update(model_name="other") for r in report["models"][0]["replicas"]],
    "a monitor of another pod": lambda report: [r["report"].update(pod_uid="other") for r in report["models"][0]["replicas"]],
    "a time long ago": lambda report: report.update(time_unix=1.0),
    "a time to come": lambda report: report.update(time_unix=10.0**11),
    "figures of last year": lambda report: [r.update(report_age_seconds=10.0**7) for r in report["models"][0]["replicas"]],
    "every model many times": lambda report: report.update(models=report["models"] * 100),
    "no window": _model(window_seconds=0.0),
    "loads for ever": _engine(load_seconds=10.0**7),
}


@pytest.mark.parametrize("lie", BELIEVED.values(), ids=BELIEVED)
def test_a_lie_that_passes_the_border_takes_nothing_away_and_adds_within_bounds(lie: Change) -> None:
    fleet, report = reported()
    before = {pod.uid for pod in fleet.of("tiny")}
    for _ in range(40):
        raw = json.loads(report.model_copy(update={"time_unix": fleet.now.timestamp()}).model_dump_json())
        lie(raw)
        fleet.traffic = TrafficView(DataState.FRESH, (parse_gateway_report(json.dumps(raw).encode()),))
        plan = fleet.step(10)
        assert not plan.drains
        assert not plan.deletes
    assert before <= {pod.uid for pod in fleet.of("tiny")}
    assert fleet.charged() <= 8


@given(
    st.lists(
        st.tuples(st.sampled_from(["chat", "document", "code"]), st.integers(0, 1000), st.integers(0, 100), st.integers(0, 100)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 16),
    st.integers(0, 16),
)
def test_whatever_the_classes_say_a_plan_is_made_and_no_replica_goes(
    classes: list[tuple[str, int, int, int]], unit: int, npus: int
) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 8)})
    fleet.add_model("tiny", model_spec("chat", 2))
    fleet.settle()
    listed = [{"name": name, "priority": p, "minPercent": low, "maxPercent": high} for name, p, low, high in classes]
    raw = {"npus": {"resourceName": RESOURCE, "unit": unit}, "classes": listed}
    view = pool_view({"metadata": {"name": "prod", "uid": "pool-uid"}, "spec": raw})
    fleet.nodes["node-0"] = node("node-0", 8, allocatable={RESOURCE: npus})
    for seen in (view, replace(view, spec=InferencePoolSpec.model_validate(raw), status=InferencePoolStatus())):
        plan = make_plan(replace(fleet.observe(), pool=seen), fleet.now)
        assert not plan.drains
        assert not plan.deletes
        assert plan.pool_status is not None
        assert all(condition.message for condition in plan.pool_status.conditions)


def test_loads_are_told_again_after_a_lie() -> None:
    fleet, report = reported()
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"time_unix": START.timestamp() - 86400}),))
    assert [c.reason for c in fleet.step(10).choices] == [Reason.HOLD_NO_DATA]
    put_load(fleet, {"tiny": Load(35)})
    fleet.step(10)
    scaling = fleet.models[("team", "tiny")].status.scaling
    assert scaling is not None
    assert scaling.data == DataState.FRESH
