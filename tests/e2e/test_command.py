"""The command `npufleet` against the real cluster: what it says is what the cluster holds, and what was recorded is planned again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from demo.install import NAMESPACE
from support.team import Json, Team, operator_pod, settled

COMMAND = Path(sys.executable).parent / "npufleet"
RECORDED = "/var/lib/npufleet/plans.jsonl"


def npufleet(team: Team, *arguments: str, status: int = 0) -> str:
    """What the command prints."""
    kubeconfig = ("--kubeconfig", str(team.kubectl.cluster.kubeconfig))
    done = subprocess.run([COMMAND, *arguments, *kubeconfig], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def _pool(team: Team) -> Json:
    status: Json = json.loads(team.kubectl("get", "npool", team.pool, "-o", "json"))["status"]
    return status


def test_a_model_is_explained_by_what_runs_and_what_its_class_is_promised(served: Team) -> None:
    key = f"{served.namespace}/tiny"
    told = npufleet(served, "explain", "model", key)
    assert told == npufleet(served, "explain", "model", "tiny", "-n", served.namespace)
    (pod,) = served.ready_pods("tiny")
    chat = next(entry for entry in _pool(served)["classes"] if entry["name"] == "chat")
    for words in (
        f"AscendModel {key}",
        "at 1 replica(s): 1 ready, 0 leaving, 1 NPU(s) charged",
        f"Class chat of pool {served.pool}",
        f"guaranteed {chat['guaranteed']} NPU(s), ceiling {chat['ceiling']}",
        pod["metadata"]["name"],
        pod["spec"]["nodeName"],
    ):
        assert words in told, told


def test_a_pool_and_the_whole_fleet_are_shown_as_the_ledger_has_them(served: Team) -> None:
    settled("the whole supply", lambda: _pool(served)["supply"] == served.kubectl.cluster.settings.npu.count)
    status = _pool(served)
    told = npufleet(served, "explain", "pool", served.pool)
    for words in (f"InferencePool {served.pool}", f"{status['nominal']} NPU(s) nominal, {status['supply']} usable", "Classes", "Models"):
        assert words in told, told
    shown = npufleet(served, "top", "--pool", served.pool, "-n", served.namespace)
    assert f"{served.namespace}/tiny" in shown
    row = next(line.split() for line in shown.splitlines() if line.startswith(served.pool))
    assert row[:4] == [served.pool, str(status["nominal"]), str(status["supply"]), str(status["foreign"])]


def test_what_is_not_there_is_told_in_one_line(served: Team) -> None:
    for arguments in (("explain", "pool", "nowhere"), ("explain", "model", f"{served.namespace}/nothing")):
        told = npufleet(served, *arguments, status=1)
        assert len(told.strip().splitlines()) == 1
        assert arguments[-1].rpartition("/")[2] in told


def test_what_the_operator_recorded_here_is_planned_again_as_it_was(served: Team, tmp_path: Path) -> None:
    served.apply_model("recorded", replicas=1)
    served.wait_condition("recorded", "Accepted", "True")
    try:
        log = tmp_path / "plans.jsonl"
        log.write_text(settled("the plan to be recorded", lambda: _recorded(served, f"{served.namespace}/recorded")), encoding="utf-8")
    finally:
        served.kubectl("delete", "amodel", "recorded")
    done = subprocess.run([COMMAND, "replay", log, "--json"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["plans"] == len(log.read_text(encoding="utf-8").splitlines()) >= 1
    assert told["different"] == 0


def _recorded(team: Team, model: str) -> str | None:
    """The recorder's log, without the line that it is writing, once it has a plan that decides something of the model."""
    pod = settled("the operator", lambda: operator_pod(team.kubectl))["metadata"]["name"]
    text = team.kubectl.cluster.run_kubectl("-n", NAMESPACE, "exec", pod, "-c", "operator", "--", "cat", RECORDED)
    whole = text[: text.rfind("\n") + 1]
    plans = [json.loads(line)["outline"] for line in whole.splitlines()]
    return whole if any(entry.startswith(f"{model} ") for plan in plans for entry in plan["decisions"]) else None
