"""Settings: what is stored, what is refused, what containers get to see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from devcluster.errors import ConfigError, NotRunningError
from devcluster.paths import Layout
from devcluster.settings import ClusterSettings, NpuSettings, default_mounts, describe, load, outermost


def test_stored_settings_come_back_as_they_were(tmp_path: Path) -> None:
    settings = ClusterSettings(
        name="x", network_index=3, npu=NpuSettings(count=16, unit=2), mounts=(Path("/usr"),), binaries={"etcd": Path("/e")}
    )
    layout = Layout(tmp_path)
    layout.config.write_text(settings.model_dump_json())
    assert load(layout) == settings


def test_a_missing_cluster_and_a_damaged_file_say_what_to_do(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "x")
    with pytest.raises(NotRunningError, match="create it with `devcluster up --name x`"):
        load(layout)
    layout.root.mkdir()
    for damage in ("", "{", "[]", '{"name": "x"}', '{"name":"x","network_index":0,"npu":{"count":-1}}'):
        layout.config.write_text(damage)
        with pytest.raises(ConfigError, match=r"cannot be read .* run `devcluster down --name x`"):
            load(layout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 5, "unit": 2}, "count 5 is no multiple of unit 2: give whole modules"),
        ({"count": 65}, "count = 65"),
        ({"resource_name": "Ascend910"}, "resource_name = 'Ascend910'"),
        ({"cards": 8}, "cards = 8"),
    ],
)
def test_impossible_cards_are_refused_by_name_and_value(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NpuSettings.model_validate(fields)
    assert message in describe(caught.value)


paths = st.lists(st.lists(st.sampled_from("abc"), max_size=3).map(lambda steps: Path("/", *steps)))


@given(paths)
def test_outermost_keeps_every_path_visible_and_nothing_twice(given_paths: list[Path]) -> None:
    kept = outermost(given_paths)
    assert all(any(path.is_relative_to(root) for root in kept) for path in given_paths)
    assert not [(a, b) for a in kept for b in kept if a != b and a.is_relative_to(b)]
    assert set(kept) <= set(given_paths)


def test_containers_see_the_system_this_python_and_what_was_asked_for(tmp_path: Path) -> None:
    mounts = default_mounts(tmp_path)
    for needed in (Path("/usr"), Path(sys.base_prefix), Path(sys.prefix), tmp_path):
        assert any(needed.is_relative_to(mount) for mount in mounts)
    assert Path("/") not in mounts
    for wrong in (Path("relative"), tmp_path / "missing"):
        with pytest.raises(ConfigError, match="must be an absolute path that exists"):
            default_mounts(None, [wrong])
