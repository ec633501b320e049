"""Guarantees and elastic scaling on the real cluster, under streaming clients that must not notice."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from npufleet_api.contract import DRAIN_STARTED_ANNOTATION
from support.team import Json, Team, operator_pod, settled

DRAIN_SECONDS = 20
CLASSES = [
    {"name": "chat", "priority": 3, "minPercent": 50, "maxPercent": 100},
    {"name": "document", "priority": 2, "minPercent": 25, "maxPercent": 50},
    {"name": "code", "priority": 1, "minPercent": 12, "maxPercent": 100},
]
FAST = {"intervalSeconds": 2, "cooldownSeconds": 5, "drainSeconds": DRAIN_SECONDS}
STRICT = {"ttftMilliseconds": 1}
"""A target that every request misses: several in flight ask for more replicas, whatever this machine can do."""
BOUND_SECONDS = 5 + DRAIN_SECONDS + 60
"""Cooldown, drain, and the time that a tiny model takes to load on a busy machine."""


def _status(team: Team, name: str) -> Json:
    status: Json = team.model(name).get("status", {})
    return status


def _pool(team: Team) -> Json:
    status: Json = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))["status"]
    return status


def _free(team: Team) -> int | None:
    """The pool's supply, once nothing of others is ending and the ledger knows."""
    pods = json.loads(team.kubectl.cluster.run_kubectl("get", "pods", "--all-namespaces", "-o", "json"))["items"]
    resource = team.kubectl.cluster.settings.npu.resource_name
    holding = [pod for pod in pods if any(resource in c["resources"].get("limits", {}) for c in pod["spec"]["containers"])]
    if any("deletionTimestamp" in pod["metadata"] for pod in holding):
        return None
    held = sum(int(c["resources"].get("limits", {}).get(resource, 0)) for pod in holding for c in pod["spec"]["containers"])
    supply: int = _pool(team).get("supply", 0)
    return supply if supply == team.kubectl.cluster.settings.npu.count - held else None


def _used(team: Team) -> dict[str, int]:
    return {entry["name"]: entry["used"] for entry in _pool(team)["classes"]}


def _reasons(team: Team, name: str) -> list[str]:
    """Reasons of the model's Events."""
    events = team.kubectl.list("events")
    return [event["reason"] for event in events if event["involvedObject"]["name"] == name]


def _desired(team: Team, name: str) -> int:
    return int(_status(team, name).get("desiredReplicas", 0))


@pytest.mark.timeout(420)
def test_load_borrows_a_guarantee_comes_back_and_no_client_notices(own_pool: Callable[..., Team]) -> None:
    team = own_pool(classes=CLASSES, rebalancing=FAST)
    cluster = team.kubectl.cluster
    cards = cluster.settings.npu.count
    free = settled("pods of earlier tests to be gone", lambda: _free(team), 180)
    guaranteed = cards // 2
    team.apply_model("coder", workloadClass="code", slo=STRICT, scaling={"minReplicas": 1, "maxReplicas": free - 2})
    team.apply_model("writer", workloadClass="document", replicas=1)
    team.apply_model("talker", workloadClass="chat", replicas=1)
    for name in ("coder", "writer", "talker"):
        team.wait_ready(name)
        team.wait_routed(name)

    with team.traffic("coder", clients=24, max_tokens=64) as coding, team.traffic("talker", clients=2) as talking:
        settled("code to borrow all that is idle", lambda: _used(team)["code"] == free - 2, 180)
        assert "PredictedMiss" in _reasons(team, "coder")
        borrowed = {entry["name"]: entry["borrowed"] for entry in _pool(team)["classes"]}
        assert borrowed["code"] > 0

        team.apply_model("talker", workloadClass="chat", replicas=guaranteed)
        settled("a replica of code to be taken back", lambda: "ReclaimedForGuarantee" in _reasons(team, "coder"), 30)
        before = operator_pod(team.kubectl)
        assert before is not None
        cluster.run_kubectl("-n", before["metadata"]["namespace"], "delete", "pod", before["metadata"]["name"], "--wait=false")
        settled("chat to have its guarantee", lambda: _used(team)["chat"] >= guaranteed, guaranteed * BOUND_SECONDS)
        settled("all of chat to serve", lambda: len(team.ready_pods("talker")) == guaranteed, BOUND_SECONDS)
        after = settled("the operator", lambda: operator_pod(team.kubectl))
        assert after["metadata"]["uid"] != before["metadata"]["uid"], "it was restarted in the middle"
        used = _used(team)
        assert (used["chat"], used["document"]) == (guaranteed, 1)
        assert used["code"] <= free - guaranteed - 1
        answered = (coding.complete, talking.complete)
        settled("traffic to go on", lambda: coding.complete > answered[0] + 3 and talking.complete > answered[1] + 3)
    assert coding.outcomes.failures == []
    assert talking.outcomes.failures == []
    assert settled("no guarantee to wait", lambda: _condition(team, "GuaranteesMet")["status"] == "True")

    cluster.npu_fail(cards - 1)
    try:
        settled("the ledger to shrink", lambda: _pool(team)["supply"] == free - 1)
        assert sum(_used(team).values()) <= free
    finally:
        cluster.npu_reset()
    settled("the supply to be back", lambda: _pool(team)["supply"] == free)

    team.apply_model("coder", workloadClass="code", slo=STRICT, scaling={"minReplicas": 1, "maxReplicas": free - 2}, replicas=1)
    settled("the pin to hold", lambda: _desired(team, "coder") == 1 and len(team.pods("coder")) == 1, BOUND_SECONDS)
    assert _status(team, "coder")["scaling"]["reason"] == "Pinned"
    team.kubectl("patch", "amodel", "coder", "--type=json", "-p", json.dumps([{"op": "remove", "path": "/spec/replicas"}]))
    settled("elastic again", lambda: _status(team, "coder")["scaling"]["reason"] != "Pinned")
    assert _desired(team, "coder") == 1


def _condition(team: Team, kind: str) -> Json:
    return next(condition for condition in _pool(team)["conditions"] if condition["type"] == kind)


@pytest.mark.timeout(300)
def test_an_idle_model_goes_to_zero_and_the_next_request_brings_it_back(own_pool: Callable[..., Team]) -> None:
    team = own_pool(classes=CLASSES, rebalancing=FAST)
    team.apply_model("sleeper", workloadClass="chat", slo=STRICT, scaling={"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 20})
    asleep = team.wait_condition("sleeper", "Available", "False", "ScaledToZero")
    assert "next one starts a replica" in asleep["message"]
    settled("the gateway to know the model", lambda: _known(team), 150)
    team.kubectl.wait("a replica", lambda: team.ready_pods("sleeper"), 120)
    team.wait_routed("sleeper")
    assert "WokenByDemand" in _reasons(team, "sleeper")
    settled("it to be idle for long enough", lambda: "Idle" in _reasons(team, "sleeper"), 120)
    settled("nothing to be left", lambda: not team.pods("sleeper"), BOUND_SECONDS)
    assert not any(DRAIN_STARTED_ANNOTATION in pod["metadata"]["annotations"] for pod in team.pods("sleeper"))


def _known(team: Team) -> bool:
    """A request asks for the model. Whether it waits for a replica or is turned away, it is demand, unless the model is not known."""
    body = {"model": f"{team.namespace}/sleeper", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return httpx.post(f"http://{team.address}/v1/chat/completions", json=body, timeout=120).status_code != httpx.codes.NOT_FOUND
