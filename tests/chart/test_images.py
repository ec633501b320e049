"""What the images are made of: read from the Dockerfiles, and put together without a container."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("Dockerfile.operator", "Dockerfile.pod")
NOT_IN_THE_CONTROL_PLANE = ("torch", "numpy", "safetensors", "tokenizers", "transformers")


def instructions(name: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile as (keyword, rest), with continued lines joined."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in lines)]


def copied(name: str) -> list[str]:
    """Paths that are copied from the working tree."""
    sources = [rest.split()[:-1] for keyword, rest in instructions(name) if keyword == "COPY" and "--from=" not in rest]
    return [path for group in sources for path in group]


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_everything_that_is_copied_is_there_and_not_ignored(name: str) -> None:
    allowed = [line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    for path in copied(name):
        assert (ROOT / path).exists(), path
        assert any(path == entry or path.startswith(f"{entry}/") for entry in allowed), f".dockerignore hides {path}"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_containers_do_not_run_as_root(name: str) -> None:
    users = [rest for keyword, rest in instructions(name) if keyword == "USER"]
    assert users[-1:] == ["65532:65532"]
    assert all(keyword not in ("RUN", "COPY", "ADD") for keyword, _ in instructions(name)[_last_user(name) :])


def _last_user(name: str) -> int:
    return max(index for index, (keyword, _) in enumerate(instructions(name)) if keyword == "USER")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_version_is_the_projects(name: str) -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert ("ARG", f"VERSION={version}") in instructions(name)


def test_the_control_plane_carries_no_engine() -> None:
    assert not set(NOT_IN_THE_CONTROL_PLANE) & set(pinned("control.txt"))
    assert not [path for path in copied("Dockerfile.operator") if "npufleet_pod" in path or "npufleet_kernels" in path]


def test_torch_and_torch_npu_are_a_pair() -> None:
    assert pinned("npu.txt")["torch_npu"].split(".post")[0] == pinned("pod.txt")["torch"]


def test_every_image_pins_the_same_versions() -> None:
    control, pod, dev = pinned("control.txt"), pinned("pod.txt"), pinned("dev.txt")
    for name, version in {**control, **pod}.items():
        assert dev.get(name) == version, f"{name} is {version} in an image and {dev.get(name)} where it is tested"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied afterwards: pytest keeps those of several runs, and torch takes gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "pins", "packages", "programs"),
    [
        (
            "Dockerfile.operator",
            "control.txt",
            {"npufleet_api", "npufleet_operator", "npufleet_gateway", "npufleet_monitor"},
            ("npufleet-operator", "npufleet-gateway", "npufleet-monitor"),
        ),
        (
            "Dockerfile.pod",
            "pod.txt",
            {"npufleet_api", "npufleet_fetch", "npufleet_pod", "npufleet_kernels"},
            ("npufleet-pod", "npufleet-fetch"),
        ),
    ],
    ids=DOCKERFILES,
)
def test_what_is_copied_and_pinned_is_enough_to_run(
    workspace: Path, name: str, pins: str, packages: set[str], programs: tuple[str, ...]
) -> None:
    source = workspace / "src"
    for path in copied(name):
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / path, target)
    binaries = workspace / "venv" / "bin"
    uv = Path(sys.executable).parent / "uv"
    run(uv, "venv", "--quiet", "--python", sys.executable, workspace / "venv")
    run(uv, "pip", "install", "--quiet", "--no-deps", "--python", binaries / "python", "-r", ROOT / "requirements" / pins, source)
    (site,) = (workspace / "venv").glob("lib/python*/site-packages")
    assert {path.name for path in site.glob("npufleet_*") if path.is_dir()} == packages
    for program in programs:
        assert "Usage:" in run(binaries / program, "--help")
    modules = [".".join(path.relative_to(site).with_suffix("").parts) for package in packages for path in site.glob(f"{package}/**/*.py")]
    imports = "\n".join(f"import {module.removesuffix('.__init__')}" for module in sorted(modules) if not module.endswith("__main__"))
    run(binaries / "python", "-c", imports)


def run(*command: str | Path) -> str:
    """Run a program outside the working tree and give back what it prints."""
    result = subprocess.run([str(part) for part in command], cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
