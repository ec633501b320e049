"""What people see of a served model: kubectl's tables, Events, and the operator's metrics and log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from demo.install import NAMESPACE
from support.team import Json, Team, operator_metrics, operator_pod, settled


def _table(output: str) -> list[dict[str, str]]:
    """Rows of kubectl's table by column, cut where its headers begin, since a cell may be empty."""
    header, *rows = output.rstrip().splitlines()
    names = header.split()
    starts = [header.index(name) for name in names]
    ends = [*starts[1:], None]
    return [{name: row[start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)} for row in rows]


@pytest.mark.parametrize("name", ["npool", "npupool", "npupools", "inferencepool", "inferencepools"])
def test_a_pool_shows_its_ledger_by_each_of_its_names(served: Team, name: str) -> None:
    (row,) = _table(served.kubectl("get", name, served.pool))
    assert list(row) == ["NAME", "CAPACITY", "ALLOCATED", "DRAINING", "READY", "AGE"]
    assert row["NAME"] == served.pool
    assert row["CAPACITY"] == str(served.kubectl.cluster.settings.npu.count)
    assert int(row["ALLOCATED"]) >= 1
    assert int(row["DRAINING"]) >= 0
    assert row["READY"] == "True"
    assert row["AGE"]


def test_a_pool_shows_supply_and_reason_when_asked_for_more(served: Team) -> None:
    def row() -> dict[str, str]:
        (found,) = _table(served.kubectl("get", "npool", served.pool, "-o", "wide"))
        return found

    # Pods of other pools may still be on their way out.
    settled("the whole supply", lambda: row()["SUPPLY"] == row()["CAPACITY"])
    assert row()["REASON"] == "Ready"


@pytest.mark.parametrize("name", ["amodel", "ascendmodel", "ascendmodels"])
def test_a_model_shows_what_it_runs_by_each_of_its_names(served: Team, name: str) -> None:
    (row,) = _table(served.kubectl("get", name))
    assert list(row) == ["NAME", "CLASS", "REPLICAS", "READY", "NPUS", "SLO", "TTFT-P95", "STATUS", "AGE"]
    assert row["NAME"] == "tiny"
    assert row["CLASS"] == "chat"
    assert (row["REPLICAS"], row["READY"], row["NPUS"], row["STATUS"]) == ("1", "1", "1", "Ready")


def test_one_word_lists_pools_and_models(served: Team) -> None:
    listed = served.kubectl("get", "npufleet", "-o", "name").split()
    assert f"inferencepool.npufleet.dev/{served.pool}" in listed
    assert "ascendmodel.npufleet.dev/tiny" in listed


def test_a_decision_is_an_event_of_its_model_and_an_entry_of_its_pool(served: Team) -> None:
    described = served.kubectl("get", "events", "--field-selector=involvedObject.kind=AscendModel,involvedObject.name=tiny", "-o", "json")
    events = json.loads(described)["items"]
    (started,) = [event for event in events if event["reason"] == "ScaledUp"]
    pod = served.pods("tiny")[0]["metadata"]["name"]
    assert pod in started["message"]
    assert started["type"] == "Normal"
    assert started["source"]["component"] == "npufleet-operator"
    model = served.model("tiny")
    assert started["involvedObject"]["uid"] == model["metadata"]["uid"]
    assert model["status"]["lastDecision"]["reason"] == "ScaledUp"
    assert pod in model["status"]["lastDecision"]["message"]
    assert "ScaledUp" in served.kubectl("describe", "amodel", "tiny")


def _samples(served: Team) -> Iterator[Sample]:
    for family in text_string_to_metric_families(operator_metrics(served.kubectl)):
        yield from family.samples


def test_the_operators_metrics_show_the_pool_and_the_model(served: Team) -> None:
    def value(name: str, **labels: str) -> float:
        (found,) = [s.value for s in _samples(served) if s.name == name and labels.items() <= s.labels.items()]
        return found

    cards = served.kubectl.cluster.settings.npu.count
    assert value("npufleet_pool_npus", pool=served.pool, state="nominal") == cards
    settled("the whole supply", lambda: value("npufleet_pool_npus", pool=served.pool, state="supply") == cards)
    assert value("npufleet_class_npus", pool=served.pool, workload_class="chat", state="guaranteed") == 1
    assert value("npufleet_model_replicas", namespace=served.namespace, model="tiny", state="ready") == 1
    assert value("npufleet_model_ready", namespace=served.namespace, model="tiny") == 1
    assert value("npufleet_operator_cycles_total", pool=served.pool, result="done") > 0
    names = {sample.name for sample in _samples(served)}
    assert {
        "npufleet_operator_api_requests_total",
        "npufleet_operator_applies_total",
        "npufleet_operator_plan_seconds_bucket",
        "npufleet_operator_decisions_total",
        "npufleet_operator_last_cycle_timestamp_seconds",
    } <= names


def test_every_line_of_the_operators_log_is_json_and_decisions_are_among_them(served: Team) -> None:
    served.apply_model("told", replicas=1)
    try:
        decisions = settled("the decision in the log", lambda: _decisions(served, "told"))
    finally:
        served.kubectl("delete", "amodel", "told")
    assert [line["decision"] for line in decisions] == ["ScaledUp"]
    assert decisions[0]["pool"] == served.pool
    assert decisions[0]["explanation"]


def _decisions(team: Team, name: str) -> list[Json]:
    """Of a model, from the log of the operator that runs now."""
    pod = settled("the operator", lambda: operator_pod(team.kubectl))["metadata"]["name"]
    text = team.kubectl.cluster.run_kubectl("-n", NAMESPACE, "logs", pod, "-c", "operator")
    lines: list[Json] = [json.loads(line) for line in text.splitlines()]
    assert lines
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    return [line for line in lines if line["message"] == "decision" and line["model"] == f"{team.namespace}/{name}"]
