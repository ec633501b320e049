"""Where files go, and which names are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster.errors import ConfigError
from devcluster.paths import Layout, cache_home, checked_name, state_home


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/devcluster"),
        ({"HOME": "/h"}, "/h/.local/state/devcluster"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/devcluster"),
        ({"XDG_STATE_HOME": "", "HOME": ""}, "/root/.local/state/devcluster"),
    ],
)
def test_state_follows_the_xdg_specification(environment: dict[str, str], expected: str) -> None:
    assert state_home(environment) == Path(expected)


def test_the_cache_has_a_home_of_its_own() -> None:
    assert cache_home({"XDG_CACHE_HOME": "/c"}) == Path("/c/devcluster")
    assert cache_home({"HOME": "/h"}) == Path("/h/.cache/devcluster")


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a/b", "..", "a" * 33, "a.b", "a\n", "ä"])
def test_names_that_could_escape_or_break_a_command_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster name"):
        Layout.of(name)


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True))
def test_dns_labels_are_accepted(name: str) -> None:
    assert checked_name(name) == name


def test_everything_but_the_lock_is_inside_the_data_directory() -> None:
    layout = Layout(Path("/data/x"))
    inside = [layout.config, layout.alive, layout.launcher, layout.control, layout.kubeconfig, layout.npu_state, layout.pki, layout.etc]
    assert all(path.is_relative_to(layout.root) for path in inside)
    assert not layout.lock.is_relative_to(layout.root), "it is held while the directory is deleted"


def test_clusters_of_the_same_name_in_two_state_folders_have_cgroups_of_their_own() -> None:
    one, other = Layout(Path("/a/devcluster/dev")), Layout(Path("/b/devcluster/dev"))
    assert one.group != other.group
    assert one.group == Layout(Path("/a/devcluster/dev")).group
    assert one.group.startswith("dev-")
