"""Virtual environments of their own for clients whose dependencies would not fit the project's: made once, kept in the project's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

READY = ".ready"


def tool_environment(requirements: Path) -> Path:
    """The `bin` folder of an environment with exactly the pinned `requirements`, dependencies included."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npufleet" / "environments"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(requirements.read_bytes() + python.encode()).hexdigest()[:12]
    folder = cache / f"{requirements.stem}-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    assert uv is not None, "uv is missing: make setup installs it"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / READY).exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
            install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin" / "python"), "-r", str(requirements)]
            subprocess.run(install, check=True)
            (folder / READY).touch()
    return folder / "bin"
