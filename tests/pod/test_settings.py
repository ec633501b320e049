from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.pool import Device
from npufleet_pod.errors import SettingsError
from npufleet_pod.settings import load_settings


def load(folder: Path, content: str | bytes) -> object:
    path = folder / "engine.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_settings(path)


def test_a_minimal_file_gets_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("modelPath: /models\nservedName: m\n")
    settings = load_settings(tmp_path / "engine.yaml")
    assert (settings.model_path, settings.device, settings.max_num_sequences) == ("/models", Device.NPU, 64)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds NoneType, not a mapping"),
        ("[]", "holds list, not a mapping"),
        ("a: [", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        ("!!python/object/apply:os.system [id]", "not YAML"),
        ("servedName: m", "modelPath: field is missing"),
        ("modelPath: /m\nservedName: m\nmodelpath: x", "modelpath: no such field"),
        ("modelPath: /m\nservedName: m\nmaxNumSequences: 0", "maxNumSequences: Input should be greater than or equal to 1, got 0"),
        ("modelPath: /m\nservedName: m\ndevice: GPU", "device: Input should be 'NPU' or 'CPU', got 'GPU'"),
        ("modelPath: /m\nservedName: m\nshutdown: {drainSeconds: -1}", "shutdown.drainSeconds: Input should be greater than or equal to 0"),
        ("modelPath: /m\nservedName: m\naliases: [m]", "aliases repeats servedName 'm'"),
        ("x" * (1024 * 1024 + 1), "more than 1048576 bytes"),
    ],
    ids=range(12),
)
def test_a_bad_file_is_told_in_one_line_with_field_value_and_remedy(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, content)
    message = str(caught.value)
    assert said in message
    assert message.startswith(f"settings file {tmp_path}/engine.yaml: ")
    assert "\n" not in message


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file or directory: mount the engine's ConfigMap there"):
        load_settings(tmp_path / "engine.yaml")
    with pytest.raises(SettingsError, match="Is a directory"):
        load_settings(tmp_path)


@given(st.binary(max_size=200))
def test_no_content_whatever_gives_another_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    with pytest.raises(SettingsError):
        load(tmp_path_factory.getbasetemp(), content)
