"""Cards that fail, pods that are evicted, nodes that are cordoned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from demo.install import apply
from devcluster.errors import CommandError
from npufleet_api.contract import DRAIN_STARTED_ANNOTATION
from support.team import Json, Team, pool_manifest, settled


def _pool(team: Team) -> Json:
    """The pool's status, with its conditions by type."""
    status = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))["status"]
    return {**status, "conditions": {condition["type"]: condition for condition in status["conditions"]}}


def test_failed_cards_lower_the_supply_and_stop_nothing(served: Team) -> None:
    cluster = served.kubectl.cluster
    cards = cluster.settings.npu.count
    before = _pool(served)
    assert (before["nominal"], before["supply"]) == (cards, cards)
    uids = [pod["metadata"]["uid"] for pod in served.pods("tiny")]

    def lost(count: int) -> Json | None:
        pool = _pool(served)
        return pool if pool["supply"] == cards - count and pool["conditions"]["CapacityAvailable"]["reason"] == "NpuUnhealthy" else None

    try:
        cluster.npu_fail(2)
        pool = settled("the pool to have lost a card", lambda: lost(1))
        capacity = pool["conditions"]["CapacityAvailable"]
        assert capacity["status"] == "False"
        assert f"1 of {cards} NPUs are not allocatable (1 on {cluster.node_name})" in capacity["message"]
        assert pool["nominal"] == cards
        assert (pool["conditions"]["Ready"]["status"], pool["conditions"]["Ready"]["reason"]) == ("True", "Degraded")
        for card in range(cards):
            cluster.npu_fail(card)
        settled("the pool to have lost every card", lambda: lost(cards))
        assert [pod["metadata"]["uid"] for pod in served.ready_pods("tiny")] == uids
        assert served.chat("tiny") == "4 tokens"
        assert served.condition("tiny")["status"] == "True"  # type: ignore[index] # it was ready before
    finally:
        cluster.npu_reset()
    settled("the supply to be back", lambda: _pool(served)["supply"] == cards)
    settled("the pool to be as before", lambda: _pool(served)["conditions"]["Ready"]["reason"] == "Ready")
    assert [pod["metadata"]["uid"] for pod in served.ready_pods("tiny")] == uids


def test_a_node_that_two_pools_select_belongs_to_the_older_one_and_both_say_so(served: Team) -> None:
    cluster, late = served.kubectl.cluster, f"late-{served.namespace}"[:40].strip("-")
    same = pool_manifest(served.pool)["spec"]["npus"]
    uids = [pod["metadata"]["uid"] for pod in served.ready_pods("tiny")]

    def shared(name: str) -> Json | None:
        status = json.loads(cluster.run_kubectl("get", "npool", name, "-o", "json")).get("status", {})
        told = next((c for c in status.get("conditions", []) if c["type"] == "NodesExclusive" and c["status"] == "False"), None)
        return {**status, "told": told} if told else None

    apply(cluster, [pool_manifest(late, npus=same)])
    try:
        loser = settled("the younger pool to say that a node is shared", lambda: shared(late))
        owner = settled("the older pool to say so", lambda: shared(served.pool))
        assert loser["told"]["reason"] == owner["told"]["reason"] == "NodesShared"
        assert f"{cluster.node_name} (to {served.pool})" in loser["told"]["message"]
        assert f"{cluster.node_name} (by {late})" in owner["told"]["message"]
        assert (loser["nominal"], owner["nominal"]) == (0, cluster.settings.npu.count)
    finally:
        cluster.run_kubectl("delete", "npool", late)
    settled("the node to be the older pool's alone", lambda: _pool(served)["conditions"]["NodesExclusive"]["status"] == "True")
    assert [pod["metadata"]["uid"] for pod in served.ready_pods("tiny")] == uids


def test_an_eviction_never_takes_the_last_replica_and_others_are_replaced(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    last = team.pods("tiny")[0]["metadata"]
    with pytest.raises(CommandError, match="would violate the pod's disruption budget"):
        _evict(team, last["name"])
    team.apply_model("tiny", replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    with team.traffic("tiny", clients=2) as traffic:
        settled("both replicas answer", lambda: len(traffic.outcomes.replicas) == 2)
        team.kubectl.wait("the eviction to be allowed", lambda: _evict(team, last["name"]))
        team.kubectl.wait("a replica in its place", lambda: len(_uids(team) - {last["uid"]}) == 2, 90)
    assert traffic.outcomes.failures == []


def _evict(team: Team, pod: str) -> str:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": team.namespace}}
    path = f"/api/v1/namespaces/{team.namespace}/pods/{pod}/eviction"
    return team.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


def _uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.ready_pods("tiny")}


@contextmanager
def _cordoned(team: Team) -> Iterator[None]:
    cluster = team.kubectl.cluster
    cluster.run_kubectl("cordon", cluster.node_name)
    try:
        yield
    finally:
        cluster.run_kubectl("uncordon", cluster.node_name)


def test_replicas_on_a_cordoned_node_serve_on_while_there_is_no_other_node(team: Team) -> None:
    team.apply_model("tiny", replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    before = _uids(team)
    with team.traffic("tiny", clients=2) as traffic:
        with _cordoned(team):
            told = team.wait_condition("tiny", "RolledOut", "False", "WaitingForSpareNPUs")
            assert "2 replica(s) wait to be replaced" in told["message"]
            settled("the pool without supply", lambda: _pool(team)["supply"] == 0)
            asked = traffic.complete
            settled("traffic goes on", lambda: traffic.complete > asked + 20)
            assert _uids(team) == before
            assert not any(DRAIN_STARTED_ANNOTATION in pod["metadata"]["annotations"] for pod in team.pods("tiny"))
        team.wait_ready("tiny")
    assert traffic.outcomes.failures == []
    assert _uids(team) == before
