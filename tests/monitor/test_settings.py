"""The settings file: read again when it changes, never worse than before."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from monitor.monitor_support import SETTINGS, write_settings
from npufleet_monitor.errors import SettingsError
from npufleet_monitor.settings import MAX_SETTINGS_BYTES, Identity, SettingsFile, parse_settings, read_identity

ENVIRONMENT = {"POD_NAME": "r0", "POD_NAMESPACE": "team-a", "POD_UID": "u"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": None}, "pool: Input should be a valid string.*None"),
        ({"scrapeIntervalSeconds": 0}, "scrapeIntervalSeconds: .*0.2.*'0'"),
        ({"device": "GPU"}, "device: .*'NPU' or 'CPU'.*'GPU'"),
        ({"alerts": {"memoryPercent": 101}}, "alerts.memoryPercent: .*100.*'101'"),
        ({"scrapeInterval": 2}, "scrapeInterval: Extra inputs"),
    ],
)
def test_a_bad_field_is_named_with_its_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_settings(yaml.safe_dump({**SETTINGS, **changes}).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff\xfe\x00", b"a: !!python/object:os.system {}", b"[" * 5000, b"\x00"])
def test_what_is_no_mapping_is_refused(raw: bytes) -> None:
    with pytest.raises(SettingsError):
        parse_settings(raw)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(SettingsError):
        parse_settings(raw)


def test_a_file_that_is_too_large_is_refused() -> None:
    with pytest.raises(SettingsError, match="at most"):
        parse_settings(b" " * (MAX_SETTINGS_BYTES + 1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent.yaml: No such file"):
        SettingsFile(tmp_path / "absent.yaml")


def test_new_content_comes_into_force(tmp_path: Path) -> None:
    file = SettingsFile(write_settings(tmp_path))
    assert not file.refresh()
    write_settings(tmp_path, alerts={"memoryPercent": 70})
    assert file.refresh()
    assert file.settings.alerts.memory_percent == 70
    assert not file.refresh()


def test_the_kubelets_swap_of_a_symbolic_link_is_noticed(tmp_path: Path) -> None:
    for version, percent in (("v1", 60), ("v2", 70)):
        (tmp_path / version).mkdir()
        write_settings(tmp_path / version, alerts={"memoryPercent": percent})
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "monitor.yaml").symlink_to("..data/monitor.yaml")
    file = SettingsFile(tmp_path / "monitor.yaml")
    assert file.settings.alerts.memory_percent == 60
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").rename(tmp_path / "..data")
    assert file.refresh()
    assert file.settings.alerts.memory_percent == 70


def test_bad_content_keeps_the_old_settings_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = SettingsFile(write_settings(tmp_path))
    before = file.settings
    (tmp_path / "monitor.yaml").write_text("pool: [", encoding="utf-8")
    for _ in range(3):
        assert not file.refresh()
    assert file.settings == before
    assert file.error is not None
    assert "monitor.yaml" in file.error
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    (tmp_path / "monitor.yaml").unlink()
    assert not file.refresh()
    assert file.settings == before
    write_settings(tmp_path)
    assert not file.refresh()
    assert file.error is None


@pytest.mark.parametrize("missing", list(ENVIRONMENT))
def test_a_pod_without_identity_is_refused(missing: str) -> None:
    with pytest.raises(SettingsError, match=f"{missing} is not set"):
        read_identity({key: value for key, value in ENVIRONMENT.items() if key != missing})
    with pytest.raises(SettingsError, match=f"{missing} is not set"):
        read_identity({**ENVIRONMENT, missing: ""})
    assert read_identity(ENVIRONMENT) == Identity("r0", "team-a", "u")
