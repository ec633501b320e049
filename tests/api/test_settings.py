"""Settings files: what the operator writes, the pod reads, and nothing unknown passes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from npufleet_api.model import Dtype, EngineProfile
from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings, MonitorSettings

ENGINE: dict[str, Any] = {"modelPath": "/models/qwen", "servedName": "qwen"}
MONITOR: dict[str, Any] = {
    "pool": "prod",
    "modelNamespace": "team-a",
    "modelName": "qwen",
    "servedName": "qwen",
    "workloadClass": "chat",
}


@given(
    served_name=st.text(alphabet="abcdefghij-.:/0123456789", min_size=1, max_size=40),
    device=st.sampled_from(Device),
    profile=st.sampled_from(EngineProfile),
    dtype=st.sampled_from(Dtype),
    max_model_length=st.none() | st.integers(min_value=16, max_value=10485760),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    accept_seconds=st.floats(min_value=0, max_value=60),
)
def test_what_is_written_as_yaml_is_read_back(accept_seconds: float, **fields: Any) -> None:
    settings = EngineSettings.model_validate({"model_path": "/models", "shutdown": {"acceptSeconds": accept_seconds}, **fields})
    text = yaml.safe_dump(settings.model_dump(mode="json", by_alias=True))
    assert EngineSettings.model_validate(yaml.safe_load(text)) == settings


def test_the_default_device_is_the_npu() -> None:
    assert EngineSettings.model_validate(ENGINE).device is Device.NPU
    assert MonitorSettings.model_validate(MONITOR).device is Device.NPU


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"modelPath": ""}, "modelPath"),
        ({"servedName": None}, "servedName"),
        ({"device": "GPU"}, "device"),
        ({"dtype": "bf16"}, "dtype"),
        ({"maxModelLength": 15}, "maxModelLength"),
        ({"maxNumSequences": 0}, "maxNumSequences"),
        ({"maxNumBatchedTokens": 2**21}, "maxNumBatchedTokens"),
        ({"maxQueuedRequests": "many"}, "maxQueuedRequests"),
        ({"tensorParallel": 65}, "tensorParallel"),
        ({"blockSize": 48}, "blockSize"),
        ({"preemption": "Never"}, "preemption"),
        ({"schedulingPolicy": "Fair"}, "schedulingPolicy"),
        ({"starvationSteps": 0}, "starvationSteps"),
        ({"pipelineDepth": 5}, "pipelineDepth"),
        ({"fusionLevel": 0}, "fusionLevel"),
        ({"hostCacheMi": -1}, "hostCacheMi"),
        ({"seed": -1}, "seed"),
        ({"shutdown": {"acceptSeconds": 61}}, "shutdown.acceptSeconds"),
        ({"shutdown": {"drainSeconds": float("nan")}}, "shutdown.drainSeconds"),
        ({"aliases": ["a"] * 9}, "aliases"),
        ({"maxNumSequence": 8}, "maxNumSequence"),
    ],
)
def test_a_bad_engine_setting_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        EngineSettings.model_validate({**ENGINE, **change})
    assert [".".join(str(part) for part in error["loc"]) for error in refused.value.errors()] == [field]


def test_an_alias_that_repeats_the_served_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValidationError, match="aliases repeats servedName 'qwen': remove it there"):
        EngineSettings.model_validate({**ENGINE, "aliases": ["qwen"]})


def test_a_disk_cache_without_host_cache_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValidationError, match=r"diskCacheMi: 100 needs hostCacheMi, .*: set it too"):
        EngineSettings.model_validate({**ENGINE, "diskCacheMi": 100})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pool": ""}, "pool"),
        ({"scrapeIntervalSeconds": 0.1}, "scrapeIntervalSeconds"),
        ({"scrapeIntervalSeconds": float("inf")}, "scrapeIntervalSeconds"),
        ({"alerts": {"memoryPercent": 101}}, "alerts.memoryPercent"),
        ({"scrapeInterval": 2}, "scrapeInterval"),
    ],
)
def test_a_bad_monitor_setting_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MonitorSettings.model_validate({**MONITOR, **change})
    assert [".".join(str(part) for part in error["loc"]) for error in refused.value.errors()] == [field]


def test_settings_are_frozen() -> None:
    settings = EngineSettings.model_validate(ENGINE)
    with pytest.raises(ValidationError, match="frozen"):
        settings.seed = 1  # type: ignore[misc]  # the assignment is what is refused
