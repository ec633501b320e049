"""What `npufleet explain` and `npufleet top` say, from the statuses that the planner writes."""

from __future__ import annotations

from dataclasses import replace

from npufleet_api.model import MeasuredSlo
from npufleet_operator.cli.cluster import Fleet as Found
from npufleet_operator.cli.top import render
from npufleet_operator.cli.wording import explain_model, explain_pool
from support.fleet import Fleet, model_spec

SLO = {"ttftMilliseconds": 800, "tpotMilliseconds": 60, "attainmentPercent": 95}
MEASURED = MeasuredSlo(
    data="Fresh", window_seconds=300, requests=1200, errors=3, attainment_percent=91, ttft_p95_milliseconds=1100,
    ttft_target_milliseconds=800, tpot_p95_milliseconds=42, tpot_target_milliseconds=60,
)  # fmt: skip


def settled() -> Fleet:
    fleet = Fleet()
    fleet.add_model("assistant", model_spec("chat", 2, slo=SLO))
    fleet.add_model("huge", model_spec("code", 9))
    fleet.settle()
    key = ("team", "assistant")
    fleet.models[key] = replace(fleet.models[key], status=fleet.models[key].status.model_copy(update={"slo": MEASURED}))
    return fleet


def test_a_model_is_explained_with_bounds_slo_class_and_replicas() -> None:
    fleet = settled()
    text = explain_model(fleet.models[("team", "assistant")], fleet.observe().pool, fleet.of("assistant"))
    assert "AscendModel team/assistant\n  at 2 replica(s): 2 ready, 0 leaving, 2 NPU(s) charged" in text
    assert "wanted: 2, pinned by spec.replicas (2): elastic scaling is off" in text
    assert "attainment 91 % of requests, 95 % promised: MISSED" in text
    assert "TTFT p95 1100 ms, target 800 ms" in text
    assert "data Fresh: about 1200 requests and 3 errors in 300 s" in text
    assert "Class chat of pool prod\n  guaranteed 1 NPU(s), ceiling 4; uses 2: 1 borrowed, 0 draining, 0 pending" in text
    assert "  0 of the pool's 8 usable NPU(s) are free" in text
    assert sum(line.endswith("serves") for line in text.splitlines()) == 2
    assert "ScaledUp: starts assistant-" in text


def test_what_is_not_as_it_should_be_says_why() -> None:
    fleet = settled()
    text = explain_model(fleet.models[("team", "huge")], fleet.observe().pool, fleet.of("huge"))
    assert "CapacityAvailable=False" in text
    assert "9 replicas of 1 NPU(s) are wanted" in text


def test_a_model_without_pool_is_explained() -> None:
    fleet = Fleet(pool=None)
    fleet.add_model("m", model_spec())
    fleet.step()
    text = explain_model(fleet.models[("team", "m")], None, [])
    assert "Pool 'prod' does not exist" in text
    assert "PoolNotFound" in text


def test_a_pool_is_explained_with_ledger_models_and_decisions() -> None:
    fleet = settled()
    pool = fleet.observe().pool
    assert pool is not None
    text = explain_pool(pool, list(fleet.models.values()))
    assert "InferencePool prod\n  8 NPU(s) nominal, 8 usable, 0 held by others' pods\n  8 charged to models" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["chat", "3", "1", "4", "2", "1", "0", "0"] in lines
    assert "Decisions, latest first" in text


def test_top_shows_ledgers_and_models_of_one_pool_or_all() -> None:
    fleet = settled()
    pool = fleet.observe().pool
    assert pool is not None
    found = Found((pool,), tuple(fleet.models.values()))
    text = render(found)
    assert text.splitlines()[0].split() == ["POOL", "NOMINAL", "SUPPLY", "FOREIGN", "ALLOCATED", "DRAINING", "MODELS", "STATE"]
    assert "team/assistant   prod   chat    2          2       2        2      91%   1100/800ms   42/60ms    Ready" in text
    assert render(found, "other") == "no InferencePool 'other'"
    assert render(Found((), ())) == "no InferencePool and no AscendModel"


def test_an_object_that_nobody_has_seen_yet_is_shown_as_such() -> None:
    fleet = Fleet()
    fleet.add_model("new", model_spec())
    text = explain_model(fleet.models[("team", "new")], fleet.observe().pool, [])
    assert "status is of generation 0, the spec of 1" in text
    assert "No conditions yet" in text
