"""Recorded inputs plan to the same answer wherever they are planned again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from npufleet_api.contract import EngineState
from npufleet_api.report import DataState, GatewayReport, ModelTraffic, ReplicaReport
from npufleet_operator.core.observed import EngineProbe, Observed, TrafficView
from npufleet_operator.core.plan import make_plan
from npufleet_operator.core.recording import digest, outline, parse, plain, record
from npufleet_operator.errors import RecordingError
from support.fleet import START, Fleet, model_spec, node, pool_spec


def traffic(fleet: Fleet, attained: int, judged: int) -> TrafficView:
    models = [
        ModelTraffic(
            namespace=namespace,
            name=name,
            served_name=name,
            workload_class="chat",
            window_seconds=300,
            judged=judged,
            attained=attained,
            ttft_p95_ms=812.5,
            replicas=[ReplicaReport(pod_name=pod.name, pod_uid=pod.uid, ready=True, draining=False, in_flight=3) for pod in fleet.of(name)],
        )
        for namespace, name in fleet.models
    ]
    return TrafficView(DataState.FRESH, (GatewayReport(gateway="g", pool="prod", time_unix=1.5, view_age_seconds=0, models=models),))


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    """A pool somewhere in its history."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    fleet = Fleet(
        nodes={f"node-{i}": node(f"node-{i}", size) for i, size in enumerate(sizes)}, pool=draw(st.sampled_from([pool_spec(), None]))
    )
    for index, (cls, replicas) in enumerate(
        draw(st.lists(st.tuples(st.sampled_from(["chat", "code", "nosuch"]), st.integers(0, 4)), max_size=4))
    ):
        engine: dict[str, Any] = draw(st.sampled_from([{}, {"maxNumSequences": 3}, {"fusionLevel": 2}]))
        fleet.add_model(f"m{index}", model_spec(cls, replicas, engine=engine))
    for _ in range(draw(st.integers(0, 6))):
        fleet.step()
    judged = draw(st.integers(0, 50))
    observed = replace(fleet.observe(), traffic=traffic(fleet, draw(st.integers(0, judged)), judged))
    refused = dict.fromkeys(fleet.models, "no") if draw(st.booleans()) else {}
    probes = {uid: EngineProbe(EngineState.DRAINING, running=1) for uid in list(fleet.pods)[:1]}
    return replace(observed, refused=refused, probes=probes)


@settings(max_examples=60)
@given(observations(), st.integers(0, 10**6))
def test_a_recorded_plan_is_planned_again_as_it_was(observed: Observed, seconds: int) -> None:
    now = START + timedelta(seconds=seconds, microseconds=7)
    plan = make_plan(observed, now)
    recording = parse(record(observed, now, plan))
    assert recording.observed == observed
    assert recording.now == now
    again = make_plan(recording.observed, recording.now)
    assert digest(again) == recording.digest
    assert outline(again) == recording.outline


def test_a_digest_tells_plans_apart() -> None:
    fleet = Fleet()
    before = digest(fleet.plan())
    fleet.add_model("m", model_spec())
    assert digest(fleet.plan()) != before


def test_a_line_is_one_line() -> None:
    fleet = Fleet()
    fleet.add_model("m", model_spec("nosuch"))
    fleet.step()
    line = record(fleet.observe(), fleet.now, fleet.plan())
    assert "\n" not in line
    assert json.loads(line)["outline"]["decisions"] == outline(fleet.plan())["decisions"]


def line_with(**changes: Any) -> str:
    fleet = Fleet()
    raw = json.loads(record(fleet.observe(), START, fleet.plan()))
    return json.dumps({**raw, **changes})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        (line_with(version=2), "version: 2"),
        (line_with(now="yesterday"), "now"),
        (line_with(observed=None), "observed"),
        (line_with(observed={"pool_name": 3}), "pool_name"),
        (line_with(digest=None), "digest"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=["truncated", "list", "version", "time", "no observation", "wrong type", "no digest", "deep"],
)
def test_a_line_that_cannot_be_planned_again_says_why(line: str, message: str) -> None:
    with pytest.raises(RecordingError) as caught:
        parse(line)
    assert message in str(caught.value)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))
def test_whatever_stands_in_a_line_there_is_no_other_error(junk: object) -> None:
    with pytest.raises(RecordingError):
        parse(line_with(observed=junk))


def test_sets_come_in_order() -> None:
    assert plain(frozenset({("b", "a"), ("a", "c")})) == [["a", "c"], ["b", "a"]]
