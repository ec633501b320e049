"""Profile, overrides and resources become the settings that an engine reads."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.model import EngineOverrides, EngineProfile
from npufleet_operator.core.engine_settings import engine_settings, resolved, settings_document, whole_cpus
from support.fleet import model_spec, pool_spec


@pytest.mark.parametrize(("quantity", "cpus"), [("1", 1), ("16", 16), ("50m", 1), ("1500m", 2), ("2.5", 3), ("0", 1), ("1k", 1000)])
def test_cpus_are_rounded_up(quantity: str, cpus: int) -> None:
    assert whole_cpus(quantity) == cpus


@given(st.from_regex(r"[0-9]{1,6}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", fullmatch=True))
def test_every_quantity_that_the_schema_takes_gives_settings(quantity: str) -> None:
    settings = engine_settings("team", "tiny", model_spec(resources={"cpu": quantity}), pool_spec())
    assert settings.cpu_threads is not None


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("HighConcurrencyChat", (8192, 128, 16, True, 2, 2, "Aggressive", "LatencyOptimised")),
        ("BatchDocumentProcessing", (65536, 32, 64, False, 3, 4, "Conservative", "ThroughputOptimised")),
        ("Balanced", (16384, 64, 32, True, 2, 3, "Aggressive", "LatencyOptimised")),
    ],
)
def test_each_profile_stands_for_its_settings(profile: str, expected: tuple[object, ...]) -> None:
    settings = engine_settings("team", "tiny", model_spec(engine={"profile": profile}), pool_spec())
    assert expected == (
        settings.max_num_batched_tokens,
        settings.max_num_sequences,
        settings.block_size,
        settings.chunked_prefill,
        settings.fusion_level,
        settings.pipeline_depth,
        settings.preemption,
        settings.scheduling_policy,
    )
    assert (settings.continuous_memory, settings.asynchronous_execution, settings.prefix_cache) == (True, True, True)


OVERRIDES: dict[str, object] = {
    "maxNumSequences": 3,
    "maxNumBatchedTokens": 77,
    "maxQueuedRequests": 9,
    "maxModelLength": 555,
    "blockSize": 128,
    "chunkedPrefill": False,
    "preemption": "Conservative",
    "schedulingPolicy": "ThroughputOptimised",
    "starvationSteps": 11,
    "pipelineDepth": 1,
    "asynchronousExecution": False,
    "continuousMemory": False,
    "fusionLevel": 1,
    "prefixCache": False,
    "hostCacheMi": 64,
    "dtype": "Float32",
    "toolFormat": "Llama",
}


@pytest.mark.parametrize("profile", list(EngineProfile))
@pytest.mark.parametrize("field", OVERRIDES)
def test_an_override_wins_over_the_profile_and_leaves_the_rest(profile: EngineProfile, field: str) -> None:
    plain = engine_settings("team", "tiny", model_spec(engine={"profile": profile}), pool_spec())
    own = engine_settings("team", "tiny", model_spec(engine={"profile": profile, field: OVERRIDES[field]}), pool_spec())
    assert own.model_dump(mode="json", by_alias=True) == {**plain.model_dump(mode="json", by_alias=True), field: OVERRIDES[field]}


def test_every_override_is_tried() -> None:
    names = {field.alias for field in EngineOverrides.model_fields.values()}
    assert names == {*OVERRIDES, "profile", "diskCacheMi", "precision", "calibrationRef"}


def test_the_disk_cache_comes_with_the_host_cache() -> None:
    settings = engine_settings("team", "tiny", model_spec(engine={"hostCacheMi": 64, "diskCacheMi": 640}), pool_spec())
    assert (settings.host_cache_mi, settings.disk_cache_mi) == (64, 640)


def test_status_shows_the_depth_that_runs() -> None:
    settings = engine_settings("team", "tiny", model_spec(engine={"pipelineDepth": 4, "asynchronousExecution": False}), pool_spec())
    assert resolved(settings).pipeline_depth == 1


def test_clients_may_use_both_names() -> None:
    settings = engine_settings("team", "tiny", model_spec(model={"uri": "pvc://x", "servedName": "assistant"}), pool_spec())
    assert (settings.served_name, settings.aliases) == ("assistant", ["team/tiny"])
    same = engine_settings("team", "tiny", model_spec(model={"uri": "pvc://x", "servedName": "team/tiny"}), pool_spec())
    assert (same.served_name, same.aliases) == ("team/tiny", [])


def test_types_by_role_reach_the_settings() -> None:
    layers = [{"first": 0, "last": 1, "feedForward": "Float32"}]
    engine = {"precision": {"feedForward": "Int8", "kvCache": "Int8", "layers": layers}}
    settings = engine_settings("team", "tiny", model_spec(engine=engine), pool_spec())
    assert settings_document(settings)["precision"] == {
        "attention": "Auto",
        "feedForward": "Int8",
        "output": "Auto",
        "kvCache": "Int8",
        "layers": layers,
    }


def test_a_calibration_says_the_batch_unless_the_model_does() -> None:
    calibrated = {"calibrationRef": {"name": "tiny-calibration"}}
    settings = engine_settings("team", "tiny", model_spec(engine=calibrated), pool_spec())
    document = settings_document(settings)
    assert document["calibrationPath"] == "/etc/npufleet-calibration/calibration.yaml"
    assert "maxNumSequences" not in document
    assert resolved(settings).max_num_sequences is None
    own = engine_settings("team", "tiny", model_spec(engine={**calibrated, "maxNumSequences": 3}), pool_spec())
    assert settings_document(own)["maxNumSequences"] == 3
    assert resolved(own).max_num_sequences == 3


def test_without_a_calibration_the_settings_leave_nothing_out() -> None:
    settings = engine_settings("team", "tiny", model_spec(), pool_spec())
    optional = {"maxModelLength", "calibrationPath"}
    assert set(settings_document(settings)) == {field.alias for field in type(settings).model_fields.values()} - optional
