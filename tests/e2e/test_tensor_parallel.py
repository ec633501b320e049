"""A model of two ranks in one pod: two NPUs are charged for it, and a rank that dies takes its replica down by name and with it back up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from npufleet_api.contract import ENGINE_CONTAINER
from support.rank_processes import worker_pids
from support.team import Json, Team, settled


def _engine(team: Team) -> Json:
    (pod,) = team.pods("tiny")
    (status,) = [one for one in pod["status"]["containerStatuses"] if one["name"] == ENGINE_CONTAINER]
    return dict(status)


def _allocated(team: Team) -> int:
    count: int = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))["status"]["allocated"]
    return count


def _of_pod(pid: int, name: str) -> bool:
    return f"POD_NAME={name}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.timeout(420)
def test_two_ranks_serve_charge_two_npus_and_a_dead_rank_is_replaced_by_name(team: Team) -> None:
    before = _allocated(team)
    team.apply_model("tiny", parallelism={"tensor": 2}, resources={"cpu": "20m", "memory": "3Gi"})
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    assert team.chat("tiny", max_tokens=5) == "5 tokens"
    assert team.model("tiny")["status"]["npus"] == 2
    settled("the ledger to charge both NPUs", lambda: _allocated(team) == before + 2)
    (pod,) = team.pods("tiny")
    (engine,) = [one for one in pod["spec"]["containers"] if one["name"] == ENGINE_CONTAINER]
    assert engine["resources"]["limits"]["huawei.com/Ascend910"] == "2"

    (worker,) = [pid for pid in worker_pids() if _of_pod(pid, pod["metadata"]["name"])]
    os.kill(worker, signal.SIGKILL)

    def restarted() -> Json | None:
        state = _engine(team)
        return state if state["restartCount"] == 1 and state["ready"] else None

    state = team.kubectl.wait("the engine to come back", restarted, 120)
    last = state["lastState"]["terminated"]
    assert last["exitCode"] == 1
    assert "engine ended: rank 1 (pid " in last["message"]
    assert "was killed by SIGKILL" in last["message"]
    team.wait_ready("tiny")
    assert team.chat("tiny", max_tokens=5) == "5 tokens"
    assert len(team.pods("tiny")) == 1
