"""Finding or building the cluster's binaries: KUBEBUILDER_ASSETS, PATH, the cache, then pinned Go modules."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from devcluster.errors import BuildError, CommandError, UnsupportedMachineError
from devcluster.paths import cache_home, state_home
from devcluster.preflight import KIND
from devcluster.run import run
from devcluster.versions import Binary, Project

Progress = Callable[[str], None]

MODULES = Path(__file__).parent / "modules"
_REPORT_SECONDS = 5.0
_VERSION_SECONDS = 10.0


def source_key(project: Project, modules: Path = MODULES) -> str:
    """Twelve hex digits over everything a build depends on: go.mod, go.sum, sources and flags."""
    digest = hashlib.sha256(f"{project.ldflags}\0{project.tags}".encode())
    folder = modules / project.name
    for file in sorted(folder.iterdir()):
        if file.suffix in (".mod", ".sum", ".go"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def cache_folder(project: Project) -> Path:
    """Where the binaries of this very version of `project` are kept."""
    return cache_home() / "bin" / f"{project.name}-{project.version}-{source_key(project)}"


def _is_right_version(binary: Binary, path: Path) -> bool:
    try:
        output = run([path, *binary.version_args], timeout_seconds=_VERSION_SECONDS)
    except (CommandError, OSError):
        return False
    return binary.version_text in output


def _installed(binary: Binary, environ: Mapping[str, str]) -> Path | None:
    """A binary of the right version in KUBEBUILDER_ASSETS, else on PATH."""
    if not binary.version_args:
        return None
    own_wrappers = state_home()
    for folder in (environ.get("KUBEBUILDER_ASSETS", ""), *environ.get("PATH", "").split(os.pathsep)):
        candidate = Path(folder) / binary.name
        if not folder or candidate.is_relative_to(own_wrappers) or not os.access(candidate, os.X_OK):
            continue
        if _is_right_version(binary, candidate):
            return candidate
    return None


def find(project: Project, environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """The binaries of `project` that are there already, by name; all or none where they belong together."""
    environ = os.environ if environ is None else environ
    cached = cache_folder(project)
    found: dict[str, Path] = {}
    for binary in project.binaries:
        path = _installed(binary, environ)
        if path is None and (cached / binary.name).is_file():
            path = cached / binary.name
        if path is not None:
            found[binary.name] = path
    folders = {path.parent for path in found.values()}
    if project.together and (len(found) < len(project.binaries) or len(folders) > 1):
        own = {binary.name: cached / binary.name for binary in project.binaries}
        return own if all(path.is_file() for path in own.values()) else {}
    return found


class _Locked:
    """One build of a project at a time on this machine; the others wait and find its result."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _go(project: Project, command: str, *arguments: str) -> list[str]:
    flags = ["-trimpath", "-mod=readonly", "-ldflags", project.ldflags]
    if project.tags:
        flags += ["-tags", project.tags]
    return ["go", command, *flags, *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"}


def time_left_text(elapsed_seconds: float, done: int, total: int) -> str:
    """How much of a build is left, in words, from the share of packages compiled so far."""
    if done == 0 or elapsed_seconds < _REPORT_SECONDS:
        return f"{done} of {total} packages"
    left = elapsed_seconds / done * max(total - done, 0)
    words = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"{done} of {total} packages, about {words} left"


def _build(project: Project, wanted: Iterable[Binary], target: Path, progress: Progress) -> None:
    packages = [binary.package for binary in wanted]
    folder = MODULES / project.name
    progress(f"{project.name} {project.version}: fetching Go modules and counting packages")
    listed = subprocess.run(
        _go(project, "list", "-deps", "-f", "{{if .Stale}}{{.ImportPath}}{{end}}", *packages),
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        raise BuildError(f"the Go modules of {project.name} could not be read: {listed.stderr.strip()[-2000:]}")
    total = len(listed.stdout.split())
    target.mkdir(parents=True, exist_ok=True)
    output = str(target) + "/" if len(packages) > 1 else str(target / next(iter(wanted)).name)
    started = reported = time.monotonic()
    done, tail = 0, ""
    with subprocess.Popen(
        _go(project, "build", "-v", "-o", output, *packages),
        cwd=folder,
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as build:
        assert build.stderr is not None  # noqa: S101 -- for the type checker: asked for above
        for line in build.stderr:
            if line.startswith(("go:", "#")) or " " in line:
                tail = (tail + line)[-4000:]
            else:
                done += 1
            now = time.monotonic()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                progress(f"{project.name} {project.version}: {time_left_text(now - started, done, total)}")
    if build.returncode != 0:
        raise BuildError(f"building {project.name} {project.version} failed: {tail.strip()}")
    progress(f"{project.name} {project.version}: built in {time.monotonic() - started:.0f} s")


def ensure(project: Project, progress: Progress) -> dict[str, Path]:
    """Every binary of `project`, built when nothing better is there.

    Raises UnsupportedMachineError without Go, BuildError when the build fails.
    """
    found = find(project)
    if len(found) == len(project.binaries):
        return found
    folder = cache_folder(project)
    with _Locked(folder.with_name(f".{folder.name}.lock")):
        found = find(project)
        missing = [binary for binary in project.binaries if binary.name not in found]
        if missing:
            if shutil.which("go") is None:
                raise UnsupportedMachineError(
                    f"{', '.join(b.name for b in missing)} not found, and there is no Go to build them: install Go 1.26,"
                    f" or point KUBEBUILDER_ASSETS or PATH to these binaries\n\n{KIND}"
                )
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            _build(project, missing, partial, progress)
            folder.mkdir(parents=True, exist_ok=True)
            for file in partial.iterdir():
                file.replace(folder / file.name)
            shutil.rmtree(partial)
    return {**found, **{binary.name: folder / binary.name for binary in missing}}
