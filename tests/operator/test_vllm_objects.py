"""The pod around vllm-ascend's image: the same contract as the native engine's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from npufleet_operator.core.objects.common import NON_ROOT_UID
from npufleet_operator.core.objects.vllm import START, USERS
from support.fleet import Fleet, model_spec, pool_spec

IMAGE = "registry.example.com/vllm-ascend:1"


def fleet_of(pool: dict[str, Any] | None = None, **spec: Any) -> Fleet:
    template = {"allowedImages": [IMAGE], **(pool or {}).pop("podTemplate", {})}
    fleet = Fleet(pool=pool_spec(podTemplate=template, **(pool or {})))
    fleet.add_model("tiny", model_spec(runtime={"name": "VLLMAscend"}, **spec))
    return fleet


def pod_of(fleet: Fleet) -> Any:
    (create,) = fleet.plan().creates
    return create.manifest


def engine_of(pod: Any) -> Any:
    (engine,) = pod["spec"]["containers"]
    return engine


def test_the_engine_runs_vllm_from_the_pools_image_under_the_same_restrictions() -> None:
    engine = engine_of(pod_of(fleet_of()))
    native = Fleet(pool=pool_spec())
    native.add_model("tiny", model_spec())
    other = engine_of(pod_of(native))
    assert engine["image"] == IMAGE
    assert engine["args"][0] == "/models"
    for field in ("securityContext", "resources", "terminationMessagePath", "livenessProbe"):
        assert engine[field] == other[field]


def test_readiness_and_the_end_are_asked_of_the_monitor() -> None:
    pod = pod_of(fleet_of())
    engine = engine_of(pod)
    assert engine["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8002}
    assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": 8000}
    assert engine["lifecycle"]["preStop"]["httpGet"] == {"path": "/terminate?accept_seconds=5&drain_seconds=60", "port": 8002}
    (monitor,) = pod["spec"]["initContainers"]
    assert monitor["command"][-2:] == ["--vllm-url", "http://127.0.0.1:8000"]
    assert {port["containerPort"] for port in monitor["ports"]} == {8001, 8002}
    assert pod["spec"]["terminationGracePeriodSeconds"] > 65


def test_the_fetch_ends_before_the_monitor_takes_its_port() -> None:
    names = [container["name"] for container in pod_of(fleet_of(model={"uri": "hf://Qwen/Qwen3-8B"}))["spec"]["initContainers"]]
    assert names == ["fetch", "monitor"]


def test_a_changed_drain_time_rolls_nothing() -> None:
    fleet = fleet_of()
    fleet.settle()
    fleet.pool = pool_spec(podTemplate={"allowedImages": [IMAGE]}, rebalancing={"drainSeconds": 90})
    assert not fleet.step().creates


def test_another_argument_rolls_the_pods() -> None:
    first = pod_of(fleet_of())["metadata"]["name"]
    assert pod_of(fleet_of(engine={"prefixCache": False}))["metadata"]["name"] != first


def test_the_pools_environment_goes_before_our_own() -> None:
    engine = engine_of(pod_of(fleet_of({"podTemplate": {"env": [{"name": "HOME", "value": "/scratch"}]}})))
    assert [v["value"] for v in engine["env"] if v["name"] == "HOME"] == ["/scratch"]


def test_the_user_has_an_entry_of_its_own() -> None:
    plan = fleet_of().plan()
    (settings,) = [o for o in plan.objects if o["kind"] == "ConfigMap" and "passwd" in o["data"]]
    assert settings["data"] == {"passwd": USERS}
    mounts = engine_of(plan.creates[0].manifest)["volumeMounts"]
    assert [m["subPath"] for m in mounts if m["mountPath"] == "/etc/passwd"] == ["passwd"]
    assert f":{NON_ROOT_UID}:" in USERS


def test_status_shows_what_vllm_runs() -> None:
    fleet = fleet_of(engine={"profile": "BatchDocumentProcessing"})
    fleet.settle()
    shown = fleet.models[("team", "tiny")].status.engine
    assert shown is not None
    assert (shown.block_size, shown.max_num_sequences, shown.preemption, shown.pipeline_depth) == (128, 32, None, None)


@pytest.mark.parametrize("argument", ['--additional-config={"a": "$(touch ran)"}', "--x=`touch ran`; touch ran", "--y=' \" *"])
def test_no_argument_is_read_as_code(tmp_path: Path, argument: str) -> None:
    program = tmp_path / "vllm"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    ended = subprocess.run(
        ["/bin/bash", "-c", START, "vllm", "/models", argument],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.splitlines() == ["serve", "/models", argument]
    assert not (tmp_path / "ran").exists()
