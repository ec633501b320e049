"""The benchmark at scale: what it applies is valid, and its pretend gateway's report is one that the planner holds still for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.report import DataState, parse_gateway_report
from npufleet_operator.core.observed import TrafficView
from npufleet_operator.core.plan import make_plan
from support.fleet import RESOURCE, Fleet, is_quiet, node

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are run from the repository and not installed

from benchmarks.operator_scale import objects  # noqa: E402 - after the path
from benchmarks.operator_scale.__main__ import percentile  # noqa: E402
from benchmarks.operator_scale.gateway import PretendGateway  # noqa: E402


def test_a_steady_report_moves_nothing() -> None:
    pool = InferencePoolSpec.model_validate(objects.pool(RESOURCE)["spec"])
    nodes = {name: node(name, labels={objects.FAKE_LABEL: "true"}) for name in ("fake-0", "fake-1")}
    fleet = Fleet(pool=pool, nodes=nodes)
    classes = {objects.model_name(i): objects.CLASSES[i % 3] for i in range(3)}
    for index in range(3):
        raw = objects.model(index)
        spec = AscendModelSpec.model_validate({**raw["spec"], "poolRef": {"name": "prod"}})
        fleet.add_model(raw["metadata"]["name"], spec, namespace=objects.TEAM)
    fleet.settle()
    gateway = PretendGateway(classes)
    gateway.pods = dict(fleet.pods)
    report = gateway.report(fleet.now.timestamp())
    assert parse_gateway_report(report.model_dump_json().encode()) == report
    for _ in range(20):
        observed = replace(fleet.observe(), traffic=TrafficView(DataState.FRESH, (report,)))
        plan = make_plan(observed, fleet.now)
        assert is_quiet(plan), [choice.message for choice in plan.choices]
        fleet.apply(plan)
        fleet.pass_time(60)
    assert len(fleet.pods) == 3 * objects.REPLICAS


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
