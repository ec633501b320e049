"""What breaks around a model leaves its clients alone: the API server, the monitor, the pool's own object."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from demo.install import apply
from npufleet_api.contract import POD_UID_ENV
from support.team import Json, Team, operator_pod, pool_manifest, settled

OUTAGE_SECONDS = 10
"""Longer than the timeouts and probe periods that an outage must not trip."""


def test_traffic_goes_on_while_the_api_server_is_down_and_changes_take_effect_after(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    cluster = team.kubectl.cluster
    before = _operator(team)
    with team.traffic("tiny", clients=2) as traffic:
        settled("traffic", lambda: traffic.complete > 5)
        cluster.stop("kube-apiserver")
        try:
            asked, down_since = traffic.complete, time.monotonic()
            settled(
                "traffic without the API server", lambda: traffic.complete > asked + 10 and time.monotonic() > down_since + OUTAGE_SECONDS
            )
        finally:
            cluster.start("kube-apiserver")
            cluster.wait_healthy()
        team.kubectl("patch", "amodel", "tiny", "--type=merge", "-p", json.dumps({"spec": {"replicas": 2}}))
        team.kubectl.wait("two replicas", lambda: len(team.ready_pods("tiny")) == 2, 120)
        settled("both replicas answer", lambda: len(traffic.outcomes.replicas) == 2)
    assert traffic.outcomes.failures == []
    # A watch that began anew after the outage must not leave the operator planning, and making pods for, what is gone.
    team.kubectl("delete", "amodel", "tiny")
    team.kubectl.wait("no pod of the deleted model", lambda: not team.pods("tiny"), 120)
    assert _operator(team) == before, "an outage of the API server must not restart the operator"


def _operator(team: Team) -> tuple[str, int]:
    """UID and restarts of the operator's pod."""
    pod = settled("the operator", lambda: operator_pod(team.kubectl))
    return pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]


def test_a_monitor_that_crashes_again_and_again_does_not_stop_traffic(team: Team) -> None:
    team.apply_model("tiny")
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    with team.traffic("tiny", clients=2) as traffic:
        os.kill(_monitor_process(team), signal.SIGKILL)
        settled("the monitor to be started again", lambda: _monitor(team)["restartCount"] == 1 and "running" in _monitor(team)["state"])
        os.kill(_monitor_process(team), signal.SIGKILL)
        # After its second crash the kubelet holds it back for a while, and the pod as a whole is not ready.
        settled("the pod to be unready", lambda: not _pod_ready(team))
        asked = traffic.complete
        settled("traffic goes on", lambda: traffic.complete > asked + 10)
        assert team.condition("tiny")["status"] == "True"  # type: ignore[index] # it was ready before
    assert traffic.outcomes.failures == []
    (pod,) = team.pods("tiny")
    assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [0]


def _monitor(team: Team) -> Json:
    (pod,) = team.pods("tiny")
    (status,) = pod["status"]["initContainerStatuses"]
    return dict(status)


def _pod_ready(team: Team) -> bool:
    (pod,) = team.pods("tiny")
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])


def _monitor_process(team: Team) -> int:
    """Process id of the pod's monitor on this machine: from inside, process 1 of a container cannot be killed."""
    (pod,) = team.pods("tiny")
    mark = f"{POD_UID_ENV}={pod['metadata']['uid']}".encode()

    def find() -> int | None:
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and mark in (entry / "environ").read_bytes()
                    and b"npufleet-monitor" in (entry / "cmdline").read_bytes()
                ):
                    return int(entry.name)
            except OSError:
                continue
        return None

    return int(settled("the monitor's process", find))


def test_a_pool_deleted_by_mistake_does_not_cut_traffic(own_pool: Callable[..., Team]) -> None:
    team = own_pool()
    team.apply_model("tiny")
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    uids = [pod["metadata"]["uid"] for pod in team.pods("tiny")]
    cluster = team.kubectl.cluster
    with team.traffic("tiny", clients=2) as traffic:
        cluster.run_kubectl("delete", "npool", team.pool, "--timeout=20s")
        told = team.wait_condition("tiny", "Accepted", "False", "PoolNotFound")
        assert "spec.poolRef.name" in told["message"]
        asked = traffic.complete
        settled("traffic goes on without the pool", lambda: traffic.complete > asked + 10)
        assert team.condition("tiny", "Available")["status"] == "True"  # type: ignore[index] # it was there before
        apply(cluster, [pool_manifest(team.pool)])
        team.wait_ready("tiny")
        asked = traffic.complete
        settled("traffic goes on with the pool", lambda: traffic.complete > asked + 10)
    assert traffic.outcomes.failures == []
    assert [pod["metadata"]["uid"] for pod in team.pods("tiny")] == uids
