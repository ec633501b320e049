"""Scaling down: replicas finish what they have, their NPUs stay charged meanwhile, and a drain can be taken back."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from npufleet_api.contract import DRAIN_STARTED_ANNOTATION, POOL_LABEL
from support.team import Json, Team, settled
from support.tiny_model import write_tiny_model

LONG_TOKENS = 4000
"""A stream of so many tokens outlasts what the test does while it runs."""


@pytest.fixture(scope="session")
def long_folder(tiny_folder: Path) -> Path:
    """A tiny model of a long context."""
    return write_tiny_model(tiny_folder.parent / "long", max_positions=8192)


def _scale(team: Team, replicas: int) -> None:
    team.kubectl("patch", "amodel", "tiny", "--type=merge", "-p", json.dumps({"spec": {"replicas": replicas}}))


def _ledger(team: Team) -> Json:
    pool: Json = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))["status"]
    (chat,) = [entry for entry in pool["classes"] if entry["name"] == "chat"]
    return {"allocated": pool["allocated"], "draining": pool["draining"], "used": chat["used"], "class draining": chat["draining"]}


def _elsewhere(team: Team) -> int:
    """NPUs of the pool's replicas in other namespaces, those that are still ending among them."""
    pods = json.loads(team.kubectl.cluster.run_kubectl("get", "pods", "-A", "-l", f"{POOL_LABEL}={team.pool}", "-o", "json"))["items"]
    return sum(
        int(container["resources"].get("requests", {}).get("huawei.com/Ascend910", 0))
        for pod in pods
        if pod["metadata"]["namespace"] != team.namespace
        for container in pod["spec"]["containers"]
    )


def _draining(team: Team) -> set[str]:
    return {p["metadata"]["uid"] for p in team.pods("tiny") if DRAIN_STARTED_ANNOTATION in p["metadata"]["annotations"]}


def test_scaling_down_fails_no_request_and_keeps_npus_charged_until_the_end(team: Team, long_folder: Path) -> None:
    team.add_volume("long", long_folder)
    team.apply_model("tiny", model={"uri": "pvc://long"}, replicas=3)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    with team.traffic("tiny", clients=6, max_tokens=600) as traffic:
        settled("three replicas answer", lambda: len(traffic.outcomes.replicas) == 3)
        _scale(team, 1)

        def charged_while_draining() -> bool:
            ledger = _ledger(team)
            return bool(
                ledger["draining"] and ledger["class draining"] == ledger["draining"] and ledger["allocated"] > _elsewhere(team) + 1
            )

        settled("draining replicas to be charged", charged_while_draining)
        team.kubectl.wait("one replica", lambda: len(team.pods("tiny")) == 1)
        settled("the ledger to follow", lambda: _ledger(team)["allocated"] == _elsewhere(team) + 1 and _ledger(team)["draining"] == 0)
        asked = traffic.complete
        settled("traffic goes on", lambda: traffic.complete > asked + 6)
    assert traffic.outcomes.failures == []
    reasons = [d["reason"] for d in _decisions(team)]
    assert reasons.count("ScaledDown") == 2
    assert reasons.count("DrainCompleted") == 2


def _decisions(team: Team) -> list[Json]:
    pool = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))
    return [d for d in pool["status"]["decisions"] if d["model"] == f"{team.namespace}/tiny"]


def test_a_drain_is_taken_back_when_the_replica_is_wanted_again(team: Team, long_folder: Path) -> None:
    team.add_volume("long", long_folder)
    team.apply_model("tiny", model={"uri": "pvc://long"}, replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    uids = {pod["metadata"]["uid"] for pod in team.ready_pods("tiny")}
    with team.traffic("tiny", clients=4, max_tokens=LONG_TOKENS) as traffic:
        settled("both replicas to work", lambda: sum(_running(team).values()) == 4)
        _scale(team, 1)
        victims = settled("a replica to drain", lambda: _draining(team))
        assert len(victims) == 1
        _scale(team, 2)
        settled("the drain to be taken back", lambda: not _draining(team))
        team.wait_ready("tiny")
    assert traffic.outcomes.failures == []
    assert {pod["metadata"]["uid"] for pod in team.ready_pods("tiny")} == uids
    assert [d["reason"] for d in _decisions(team)][-2:] == ["ScaledDown", "DrainCancelled"]
    with team.traffic("tiny", clients=4) as again:
        settled("both replicas answer again", lambda: len(again.outcomes.replicas) == 2)
    assert again.outcomes.failures == []


def _running(team: Team) -> dict[str, int]:
    """Requests that each replica works on, by the gateway's report."""
    report = httpx.get(f"http://{team.address}/report", timeout=30).raise_for_status().json()
    models = [m for m in report["models"] if (m["namespace"], m["name"]) == (team.namespace, "tiny")]
    return {replica["pod_uid"]: replica["in_flight"] for model in models for replica in model["replicas"]}
