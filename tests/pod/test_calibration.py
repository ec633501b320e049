"""Files that are no calibrations are told apart from those that are, whatever is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npufleet_api.calibration import Calibration
from npufleet_api.model import EngineProfile
from npufleet_api.settings import EngineSettings
from npufleet_pod.calibration import load_calibration
from npufleet_pod.engine.fusion import FusionThresholds
from npufleet_pod.engine.profiles import fusion_thresholds, with_profile
from npufleet_pod.errors import SettingsError
from npufleet_pod.settings import load_settings

MADE_FOR: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "hiddenSize": 64,
    "heads": 4,
    "kvHeads": 2,
    "headSize": 16,
    "device": "a",
    "dtype": "Float32",
}


def calibration(**parts: Any) -> Calibration:
    return Calibration.model_validate({"madeFor": MADE_FOR, **parts})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 96),
        ({"profile": "HighConcurrencyChat"}, 96),
        ({"profile": "HighConcurrencyChat", "maxNumSequences": 5}, 5),
        ({"maxNumSequences": 5}, 5),
    ],
)
def test_a_calibration_goes_before_the_profile_and_after_what_is_written(fields: dict[str, Any], expected: int) -> None:
    parsed = EngineSettings.model_validate({"modelPath": "/m", "servedName": "m", **fields})
    assert with_profile(parsed, calibration(batch={"maxNumSequences": 96})).max_num_sequences == expected
    if "maxNumSequences" not in fields:
        without = 128 if parsed.profile is EngineProfile.HIGH_CONCURRENCY_CHAT else 64
        assert with_profile(parsed, calibration()).max_num_sequences == without


def test_thresholds_are_the_files_or_the_defaults() -> None:
    assert fusion_thresholds(None) == fusion_thresholds(calibration()) == FusionThresholds(512, 2048)
    assert fusion_thresholds(calibration(fusion={"fullTokens": 3, "twoPhaseTokens": 5})) == FusionThresholds(3, 5)


def test_settings_take_the_calibration_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "calibration.yaml").write_text(yaml.safe_dump({"madeFor": MADE_FOR, "batch": {"maxNumSequences": 48}}))
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump({"modelPath": "/m", "servedName": "m", "calibrationPath": str(tmp_path / "calibration.yaml")}))
    assert load_settings(path).max_num_sequences == 48
    (tmp_path / "calibration.yaml").unlink()
    assert load_settings(path, calibrated=False).max_num_sequences == 64
    with pytest.raises(SettingsError, match="No such file or directory: mount the calibration there, or unset"):
        load_settings(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "valid dictionary"),
        ("[]", "valid dictionary"),
        ("madeFor: 3", "madeFor"),
        ("a: [", "not YAML"),
        ("\x00", "not YAML"),
        ("[" * 50_000, "not YAML"),
        ("fusion: {}", "madeFor: field is missing"),
    ],
)
def test_a_file_that_is_none_is_named_with_the_remedy(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=f"{path}: .*{said}") as caught:
        load_calibration(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused_as_settings_are(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_bytes(raw)
    with pytest.raises(SettingsError):
        load_calibration(path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from([*MADE_FOR, "fusion", "batch", "int8KvHeads"]), value=TREES)
def test_a_field_of_any_value_is_taken_or_refused(field: str, value: Any, tmp_path: Path) -> None:
    document: dict[str, Any] = {"madeFor": dict(MADE_FOR)}
    (document["madeFor"] if field in MADE_FOR else document)[field] = value
    path = tmp_path / "calibration.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        found = load_calibration(path)
    except SettingsError:
        return
    thresholds = fusion_thresholds(found)
    assert 1 <= thresholds.full_tokens <= thresholds.two_phase_tokens
