"""The main job: a model is applied, served, changed and deleted, while its clients notice nothing that they should not."""

from __future__ import annotations

import json
from typing import Any

from demo.install import NAMESPACE
from support.team import Team, operator_pod, settled


def test_an_applied_model_becomes_ready_and_answers(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    assert team.chat("tiny", max_tokens=5) == "5 tokens"
    model = team.model("tiny")
    assert model["status"]["npus"] == 1
    assert model["status"]["endpoint"].endswith("/v1")
    assert "finalizers" not in model["metadata"]


def test_an_engine_setting_rolls_out_without_a_failed_request(team: Team) -> None:
    team.apply_model("tiny", replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    before = {pod["metadata"]["name"] for pod in team.pods("tiny")}
    with team.traffic("tiny") as traffic:
        settled("traffic", lambda: traffic.complete > 5)
        team.apply_model("tiny", replicas=2, engine={"maxNumSequences": 12})
        team.wait_ready("tiny")
        at_end = traffic.complete
        settled("traffic on the new revision", lambda: traffic.complete > at_end + 5)
    assert traffic.outcomes.failures == []
    after = {pod["metadata"]["name"] for pod in team.ready_pods("tiny")}
    assert len(after) == 2
    assert not after & before


def test_an_image_that_cannot_be_fetched_leaves_the_old_revision_serving(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    cluster = team.kubectl.cluster
    patch: dict[str, Any] = {"spec": {"podTemplate": {"images": {"engine": "devcluster.local/absent:1"}}}}
    with team.traffic("tiny", clients=2) as traffic:
        try:
            cluster.run_kubectl("patch", "npool", team.pool, "--type=merge", "-p", json.dumps(patch))
            team.wait_condition("tiny", "RolledOut", "False")
            settled("the new revision's pod fails", lambda: [p for p in team.pods("tiny") if _waits_for_image(p)])
            asked = traffic.complete
            settled("traffic goes on", lambda: traffic.complete > asked + 5)
            assert len(team.ready_pods("tiny")) == 1
        finally:
            patch["spec"]["podTemplate"]["images"]["engine"] = None
            cluster.run_kubectl("patch", "npool", team.pool, "--type=merge", "-p", json.dumps(patch))
        team.wait_ready("tiny")
    assert traffic.outcomes.failures == []
    settled("the broken revision's pod is gone", lambda: len(team.pods("tiny")) == 1)


def _waits_for_image(pod: dict[str, Any]) -> bool:
    reasons = [c.get("state", {}).get("waiting", {}).get("reason", "") for c in pod["status"].get("containerStatuses", [])]
    return any("Image" in reason for reason in reasons)


def test_a_killed_pod_comes_back_and_fails_only_what_it_was_sending(team: Team) -> None:
    team.apply_model("tiny", replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    clients = 4
    with team.traffic("tiny", clients=clients, max_tokens=64) as traffic:
        settled("both replicas answer", lambda: len(traffic.outcomes.replicas) == 2)
        metadata = team.ready_pods("tiny")[0]["metadata"]
        victim = metadata["name"]
        team.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        settled("the replica is replaced", lambda: len(_ready_uids(team) - {metadata["uid"]}) == 2)
        asked = traffic.complete
        settled("traffic goes on", lambda: traffic.complete > asked + 10)
    assert len(traffic.outcomes.failures) <= clients, "only streams that the killed replica was sending may fail"
    for failure in traffic.outcomes.failures:
        assert victim in failure, failure
        assert "error event" in failure, "a broken stream ends with an error event, not with silence"


def _ready_uids(team: Team) -> set[str]:
    return {pod["metadata"]["uid"] for pod in team.ready_pods("tiny")}


def test_an_operator_killed_in_mid_rollout_ends_in_the_same_state(team: Team) -> None:
    team.apply_model("tiny", replicas=2)
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    cluster = team.kubectl.cluster
    with team.traffic("tiny", clients=2) as traffic:
        team.apply_model("tiny", replicas=2, engine={"maxNumSequences": 11})
        settled("the rollout has begun", lambda: len(_revisions(team)) == 2)
        for _ in range(2):
            pod = operator_pod(team.kubectl)
            if pod:
                cluster.run_kubectl("-n", NAMESPACE, "delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
            settled("another operator", lambda: operator_pod(team.kubectl))
        team.wait_ready("tiny")
    assert traffic.outcomes.failures == []
    settled("nothing of the old revision is left", lambda: len(team.pods("tiny")) == 2 and len(_revisions(team)) == 1)
    settled("its settings are gone too", lambda: len(_settings_maps(team)) == 1)
    assert len(team.ready_pods("tiny")) == 2


def _revisions(team: Team) -> set[str]:
    return {pod["metadata"]["labels"]["npufleet.dev/revision"] for pod in team.pods("tiny")}


def _settings_maps(team: Team) -> list[str]:
    maps = team.kubectl.list("configmaps", "app.kubernetes.io/managed-by=npufleet-operator")
    return [m["metadata"]["name"] for m in maps if "engine.yaml" in m["data"]]


def test_a_deleted_model_leaves_nothing(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    team.kubectl("delete", "ascendmodel", "tiny", "--timeout=20s")
    kinds = "pods,services,configmaps,poddisruptionbudgets,networkpolicies"
    team.kubectl.wait(
        "all children to be gone",
        lambda: not json.loads(team.kubectl("get", kinds, "-l", "app.kubernetes.io/managed-by=npufleet-operator", "-o", "json"))["items"],
    )
    assert team.chat("tiny") is None
