"""Compiles the CPU kernels: ahead, by `python -m npufleet_kernels.build`, or on first use where that was not done.

One shared object holds the kernels for every instruction set; which of them runs is chosen at run time (`native`). What was compiled
ahead lies beside the sources. On first use it goes to a cache folder under a name made of the sources, the flags, the compiler, torch's
version and its C++ ABI, so that a change of any of them compiles anew. One process compiles, others wait for it; a file appears under
its name only when it is whole.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npufleet_kernels.errors import BuildError

SOURCE_DIR = Path(__file__).parent / "cpu"
BUILT_DIR = SOURCE_DIR / "built"
CACHE_ENV = "NPUFLEET_KERNELS_CACHE"
COMPILERS = ("g++", "c++", "clang++")
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# GCC warns of its own header where an intrinsic leaves a register undefined on purpose.
KERNEL_FLAGS = ("-O3", "-fno-exceptions", "-fno-rtti", "-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-ignored-attributes")
BUILD_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Unit:
    """A file that is compiled on its own, with the flags that only it gets."""

    source: str
    name: str
    flags: tuple[str, ...]
    torch: bool = False


UNITS = (
    Unit("isa.cpp", "avx2", (*KERNEL_FLAGS, "-DNPUFLEET_ISA=0", "-mavx2", "-mfma")),
    Unit("isa.cpp", "avx512", (*KERNEL_FLAGS, "-DNPUFLEET_ISA=1", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")),
    Unit(
        "isa.cpp",
        "avx512_bf16",
        (*KERNEL_FLAGS, "-DNPUFLEET_ISA=2", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx512bf16"),
    ),
    Unit("pool.cpp", "pool", ("-O2", "-pthread")),
    Unit("step.cpp", "step", ("-O2",)),
    Unit("binding.cpp", "binding", ("-O2", "-Wno-unused-parameter"), torch=True),
)
"""What has no flags for an instruction set runs on every x86-64 CPU."""


def supported_machine() -> bool:
    """Whether there are kernels for this kind of machine at all."""
    return platform.machine() in ("x86_64", "AMD64")


def library() -> Path:
    """The compiled kernels: those made ahead, else those in the cache, compiled now if need be. Raises BuildError."""
    ahead = BUILT_DIR / f"npufleet_cpu-{_key()}.so"
    if ahead.is_file():
        return ahead
    compiler = find_compiler()
    return _publish(compiler, _cache_dir() / f"npufleet_cpu-{_key(compiler)}.so")


def build_ahead() -> Path:
    """Compile the kernels beside their sources, unless they are there. Raises BuildError."""
    target = BUILT_DIR / f"npufleet_cpu-{_key()}.so"
    return target if target.is_file() else _publish(find_compiler(), target)


def find_compiler() -> str:
    """`CXX`, or the first C++ compiler on PATH. Raises BuildError."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(
        f"the CPU kernels are not compiled and there is no C++ compiler ({', '.join(names)}): install g++, run "
        "`python -m npufleet_kernels.build` where there is one, or ask for the reference with NPUFLEET_KERNELS=reference"
    )


def _key(compiler: str | None = None) -> str:
    """Of what the result depends on; with the compiler where it is known."""
    import torch

    digest = hashlib.sha256()
    for path in sorted([*SOURCE_DIR.glob("*.cpp"), *SOURCE_DIR.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((UNITS, COMMON_FLAGS, torch.__version__, torch.compiled_with_cxx11_abi())).encode())
    if compiler is not None:
        digest.update(_run([compiler, "--version"]).encode())
    return digest.hexdigest()[:20]


def _cache_dir() -> Path:
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet" / "kernels"


def _publish(compiler: str, target: Path) -> Path:
    """Compile into `target`, once however many processes ask for it."""
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / "lock"):
            if target.is_file():
                return target
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
                began = time.monotonic()
                _tell(f"compiling the CPU kernels with {compiler} (about 15 s, once): {target}")
                made = _compile(compiler, Path(folder))
                made.replace(target)
                _tell(f"compiled the CPU kernels in {time.monotonic() - began:.0f} s")
    except OSError as error:
        raise BuildError(
            f"{target.parent}: the CPU kernels cannot be written there ({error.strerror}): set {CACHE_ENV} to a folder that can be"
        ) from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when that process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, folder: Path) -> Path:
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [flag for path in include_paths() for flag in ("-isystem", path)]
    # The threads only wait for compilers; the one that takes longest comes first.
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        units = sorted(UNITS, key=lambda unit: not unit.torch)
        objects = list(pool.map(lambda unit: str(compile_unit(compiler, unit, folder, includes if unit.torch else ())), units))
    made = folder / "npufleet_cpu.so"
    paths = [f"-L{path}" for path in library_paths()]
    _run([compiler, "-shared", "-pthread", *objects, *paths, "-ltorch_cpu", "-lc10", "-Wl,--no-undefined", "-o", str(made)])
    return made


def compile_unit(compiler: str, unit: Unit, folder: Path, includes: Sequence[str] = ()) -> Path:
    """The object file of one unit. Raises BuildError."""
    output = folder / f"{unit.name}.o"
    _run([compiler, *COMMON_FLAGS, *unit.flags, *includes, "-c", str(SOURCE_DIR / unit.source), "-o", str(output)])
    return output


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)  # noqa: S603 - a compiler
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run: {error}: install g++, or name a compiler in CXX") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
        raise BuildError(f"{command[0]} failed with exit code {done.returncode}: {said}: use g++ 12 or later, named in CXX")
    return done.stdout


def main() -> None:
    """Command line."""
    argparse.ArgumentParser(prog="python -m npufleet_kernels.build", description=(__doc__ or "").split("\n\n")[0]).parse_args()
    if not supported_machine():
        sys.exit(f"there are no kernels for {platform.machine()}: torch's operators are used there")
    try:
        print(build_ahead())  # noqa: T201 - the answer
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
