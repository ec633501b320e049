"""Which of several troubles a person is told, and in whose words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npufleet_api.conditions import Reason
from npufleet_operator.core.observed import PodView
from npufleet_operator.core.trouble import diagnose, worst
from support.fleet import START

POD = PodView("team", "p", "u", START, {}, "m", "tiny", "n", "Running", {})


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"waiting_reason": "ErrImagePull", "waiting_message": "no such image x:1"}, Reason.IMAGE_PULL_FAILED, "no such image x:1"),
        (
            {"waiting_reason": "CreateContainerConfigError", "waiting_message": "configmap missing"},
            Reason.CONFIG_ERROR,
            "configmap missing",
        ),
        (
            {"node": "", "scheduling_message": '0/1 nodes: persistentvolumeclaim "weights" not found'},
            Reason.MODEL_UNAVAILABLE,
            "spec.model.uri",
        ),
        ({"node": "", "scheduling_message": "0/1 nodes: Insufficient cpu"}, Reason.UNSCHEDULABLE, "Insufficient cpu"),
        ({"terminated_message": "noise\nlast words\n", "exit_code": 1}, Reason.ENGINE_FAILED, "last words"),
        ({"terminated_message": "device: NPU needs torch_npu", "exit_code": 69}, Reason.DEVICE_UNAVAILABLE, "torch_npu"),
        ({"terminated_message": "/models/config.json: no such file", "exit_code": 65}, Reason.MODEL_UNAVAILABLE, "config.json"),
        ({"terminated_message": "maxModelLength: too long", "exit_code": 78}, Reason.SPEC_REFUSED, "maxModelLength"),
        ({"terminated_reason": "OOMKilled", "exit_code": 137}, Reason.OUT_OF_MEMORY, "spec.resources.memory"),
        ({"terminated_message": "x", "engine_started": True}, Reason.LOADING, "is loading"),
        ({"engine_restarts": 4}, Reason.ENGINE_FAILED, "restarted 4 times"),
        ({}, Reason.LOADING, "is loading"),
    ],
)
def test_one_replica(changes: dict[str, Any], reason: Reason, said: str) -> None:
    trouble = diagnose(replace(POD, **changes))
    assert trouble is not None
    assert trouble.reason is reason
    assert said in trouble.message


def test_a_replica_that_serves_has_none() -> None:
    assert diagnose(replace(POD, engine_ready=True, terminated_message="old")) is None


def test_what_a_person_must_act_on_comes_first() -> None:
    loading = replace(POD, name="a")
    broken = replace(POD, name="b", waiting_reason="ImagePullBackOff", waiting_message="denied")
    trouble = worst([loading, broken])
    assert trouble is not None
    assert trouble.reason is Reason.IMAGE_PULL_FAILED
    assert worst([]) is None
