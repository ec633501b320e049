"""Running other programs, with errors that say what failed."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from devcluster.errors import CommandError

_TAIL_CHARACTERS = 4000


def run(
    command: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
) -> str:
    """Run `command`, return its standard output; raises CommandError with the end of its output when it fails."""
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env=None if env is None else dict(env),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            pass_fds=pass_fds,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{argv[0]} was not found; is it installed and on PATH?") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"`{shlex.join(argv)}` did not end within {timeout_seconds} s") from error
    if done.returncode != 0:
        output = (done.stderr + done.stdout).strip()[-_TAIL_CHARACTERS:]
        raise CommandError(f"`{shlex.join(argv)}` failed with status {done.returncode}: {output}")
    return done.stdout
