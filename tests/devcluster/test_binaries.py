"""Which binary is taken, from where; and that builds are real."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from devcluster import binaries
from devcluster.errors import BuildError, UnsupportedMachineError
from devcluster.versions import PROJECTS, Binary, Project, project

TOOL = Project("tool", "1.0", (Binary("tool", ".", ("--version",), "tool v1."), Binary("helper", ".", ("--version",), "tool v1.")))
TOGETHER = Project("tool", "1.0", TOOL.binaries, together=True)


def put(folder: Path, name: str, version: str = "tool v1.7") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho {version}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, a state home and a module folder of the test's own."""
    if shutil.which("go"):
        # Go's own cache follows XDG_CACHE_HOME too, and without it each build would compile the standard library.
        go_cache = subprocess.run(["go", "env", "GOCACHE"], capture_output=True, text=True, check=True).stdout.strip()
        monkeypatch.setenv("GOCACHE", go_cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    modules = tmp_path / "modules"
    (modules / "tool").mkdir(parents=True)
    (modules / "tool" / "go.mod").write_text("module devcluster.local/tool\n\ngo 1.21\n")
    (modules / "tool" / "main.go").write_text('package main\n\nfunc main() { println("built") }\n')
    monkeypatch.setattr(binaries, "MODULES", modules)
    monkeypatch.setattr(binaries.source_key, "__defaults__", (modules,))
    return tmp_path


def test_kubebuilder_assets_come_before_path_and_path_before_the_cache(home: Path) -> None:
    cached = put(binaries.cache_folder(TOOL), "tool")
    assert binaries.find(TOOL, {}) == {"tool": cached}
    on_path = put(home / "bin", "tool")
    assert binaries.find(TOOL, {"PATH": f"/nowhere::{home}/bin"}) == {"tool": on_path}
    asset = put(home / "assets", "tool")
    assert binaries.find(TOOL, {"PATH": f"{home}/bin", "KUBEBUILDER_ASSETS": f"{home}/assets"}) == {"tool": asset}


@pytest.mark.parametrize("version", ["tool v2.0", "tool v11.0", ""])
def test_another_version_is_passed_over(home: Path, version: str) -> None:
    put(home / "old", "tool", version)
    right = put(home / "new", "tool")
    assert binaries.find(TOOL, {"PATH": f"{home}/old"}) == {}
    assert binaries.find(TOOL, {"PATH": f"{home}/old:{home}/new"}) == {"tool": right}


def test_our_own_wrappers_are_never_taken_for_the_real_program(home: Path) -> None:
    put(home / "state" / "devcluster" / "dev" / "bin", "tool")
    assert binaries.find(TOOL, {"PATH": f"{home}/state/devcluster/dev/bin"}) == {}


def test_binaries_that_belong_together_are_not_mixed(home: Path) -> None:
    put(home / "a", "tool")
    put(home / "b", "helper")
    environment = {"PATH": f"{home}/a:{home}/b"}
    assert set(binaries.find(TOOL, environment)) == {"tool", "helper"}
    assert binaries.find(TOGETHER, environment) == {}
    for name in ("tool", "helper"):
        put(binaries.cache_folder(TOGETHER), name)
    assert {path.parent for path in binaries.find(TOGETHER, environment).values()} == {binaries.cache_folder(TOGETHER)}


def test_the_cache_key_follows_every_source_and_flag(home: Path) -> None:
    one = Project("tool", "1.0", (Binary("tool", "."),))
    keys = {binaries.source_key(one), binaries.source_key(Project("tool", "1.0", one.binaries, tags="x"))}
    (home / "modules" / "tool" / "go.sum").write_text("a sum\n")
    keys.add(binaries.source_key(one))
    assert len(keys) == 3


needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="builds with Go, which is not on PATH here")


@needs_go
def test_what_is_missing_is_built_once_and_then_found(home: Path) -> None:
    one = Project("tool", "1.0", (Binary("tool", "."),))
    said: list[str] = []
    built = binaries.ensure(one, said.append)
    assert subprocess.run([built["tool"]], capture_output=True, text=True, check=True).stderr == "built\n"
    assert said
    said.clear()
    assert binaries.ensure(one, said.append) == built
    assert said == []


@needs_go
def test_a_build_that_fails_leaves_nothing_behind_and_shows_the_compilers_words(home: Path) -> None:
    (home / "modules" / "tool" / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")
    one = Project("tool", "1.0", (Binary("tool", "."),))
    with pytest.raises(BuildError, match=r"(?s)building tool 1\.0 failed:.*undefined"):
        binaries.ensure(one, lambda _: None)
    assert not (binaries.cache_folder(one) / "tool").exists()
    (home / "modules" / "tool" / "go.mod").write_text("nonsense\n")
    with pytest.raises(BuildError, match="the Go modules of tool could not be read"):
        binaries.ensure(one, lambda _: None)


def test_without_go_the_missing_binaries_are_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UnsupportedMachineError, match=r"tool, helper not found, and there is no Go .* KUBEBUILDER_ASSETS or PATH(?s:.*)kind create cluster"
    ):
        binaries.ensure(TOOL, lambda _: None)


@pytest.mark.parametrize(
    ("elapsed", "done", "total", "text"),
    [
        (0.5, 0, 1000, "0 of 1000 packages"),
        (60.0, 0, 1000, "0 of 1000 packages"),
        (60.0, 100, 1000, "100 of 1000 packages, about 9 min left"),
        (60.0, 900, 1000, "900 of 1000 packages, about 7 s left"),
        (60.0, 1001, 1000, "1001 of 1000 packages, about 0 s left"),
    ],
)
def test_time_left_is_told_from_what_was_compiled(elapsed: float, done: int, total: int, text: str) -> None:
    assert binaries.time_left_text(elapsed, done, total) == text


def test_every_project_is_pinned_by_a_go_mod_of_its_own_version() -> None:
    for known in PROJECTS:
        go_mod = (Path(binaries.__file__).parent / "modules" / known.name / "go.mod").read_text()
        if known.name != "pause":
            assert f" v{known.version}" in go_mod, f"{known.name}: versions.py and go.mod disagree"
    assert project("etcd").name == "etcd"


@needs_go
def test_the_go_sources_are_formatted() -> None:
    modules = Path(binaries.__file__).parent / "modules"
    assert subprocess.run(["gofmt", "-l", str(modules)], capture_output=True, text=True, check=True).stdout == ""
