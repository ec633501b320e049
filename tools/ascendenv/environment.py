"""Makes the environments, once: each lies in the cache under a name that follows from all that it is made of.

`npu` holds torch_npu and stand-ins for CANN, on top of the environment that asks for it: torch, pytest and the project come from there.
`triton` holds the Triton-Ascend compiler alone, which is a package called triton too and must not lie beside torch's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from ascendenv import stubs
from ascendenv.errors import EnvironmentBuildError, StubError

Progress = Callable[[str], None]

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
NPU_REQUIREMENTS = REQUIREMENTS / "npu.txt"
TRITON_REQUIREMENTS = REQUIREMENTS / "triton-ascend.txt"
REPORTS_ENV = "ASCENDENV_REPORTS"
"""Names the file of reports where a pytest runs in the environment of another one."""
OVERLAY = "ascendenv-overlay.pth"
COMPAT = "ascendenv-compat.pth"


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/ascendenv`, else `~/.cache/ascendenv`."""
    given = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: a relative value is to be ignored.
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "ascendenv"


def npu_environment(progress: Progress = lambda _: None) -> Path:
    """The Python with torch_npu over this one's packages. Raises EnvironmentBuildError."""
    below = sysconfig.get_path("platlib")
    torch_version = _version_of(Path(below), "torch")
    key = _key(NPU_REQUIREMENTS.read_text(), Path(stubs.__file__).read_text(), Path(__file__).read_text(), below, torch_version)
    return _once(cache_home() / f"npu-{key}", progress, lambda folder: _make_npu(folder, below, progress))


def triton_environment(progress: Progress = lambda _: None) -> Path:
    """The Python with Triton-Ascend and its compilers. Raises EnvironmentBuildError."""
    key = _key(TRITON_REQUIREMENTS.read_text(), Path(__file__).read_text(), sys.base_prefix)
    return _once(cache_home() / f"triton-{key}", progress, lambda folder: _make_triton(folder, progress))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((*parts, sys.version)).encode()).hexdigest()[:12]


def _version_of(packages: Path, name: str) -> str:
    found = sorted(packages.glob(f"{name}-*.dist-info"))
    if not found:
        raise EnvironmentBuildError(f"{name} is not installed for {sys.executable}: run make setup")
    return found[0].name


def _once(folder: Path, progress: Progress, make: Callable[[Path], None]) -> Path:
    """The environment in `folder`, made by `make` unless it is complete; others that want it meanwhile wait."""
    python, complete = folder / "bin" / "python", folder / "complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            progress(f"making {folder}")
            if folder.exists():
                shutil.rmtree(folder)
            try:
                make(folder)
            except StubError as error:
                raise EnvironmentBuildError(f"{folder.name}: {error}") from error
            complete.touch()
    return python


def _make_npu(folder: Path, below: str, progress: Progress) -> None:
    _venv(folder)
    packages = _packages(folder)
    # site.addsitedir, not a plain path: the packages below have .pth files of their own, the project's among them.
    (packages / OVERLAY).write_text(f"import site; site.addsitedir({below!r})\n")
    _install(folder, NPU_REQUIREMENTS, "--no-deps")
    progress("building stand-ins for CANN")
    # torch_npu's libraries look for CANN's in this folder before any other.
    libraries = packages / "torch_npu.libs"
    stubs.build(packages / "torch_npu", Path(below) / "torch", libraries)
    compat = libraries / stubs.COMPAT_LIBRARY
    if compat.exists():
        (packages / COMPAT).write_text(f"import ctypes; ctypes.CDLL({str(compat)!r}, ctypes.RTLD_GLOBAL)\n")


def _make_triton(folder: Path, progress: Progress) -> None:
    _venv(folder)
    progress("installing Triton-Ascend and its compilers")
    _install(folder, TRITON_REQUIREMENTS, "--no-deps")


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _venv(folder: Path) -> None:
    _run("venv", "--quiet", "--python", sys.executable, str(folder))


def _install(folder: Path, requirements: Path, *options: str) -> None:
    _run("pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *options, "--requirement", str(requirements))


def _run(*arguments: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv) if uv.exists() else "uv", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise EnvironmentBuildError("uv is neither beside this Python nor on PATH: run make setup") from error
    except subprocess.CalledProcessError as error:
        raise EnvironmentBuildError(f"{' '.join(command)}: {error.stderr.strip()}") from error
