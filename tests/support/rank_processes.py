"""The processes of an engine's ranks, as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

WORKER = b"npufleet_pod.engine.distributed.worker"


def worker_pids() -> dict[int, int]:
    """Every such process that this one sees, with its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        if WORKER in command:
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def rank_pids(parent: int | None = None) -> list[int]:
    """Processes of ranks 1 and up that `parent`, or this process, started, in the order of the ranks."""
    own = os.getpid() if parent is None else parent
    return sorted(pid for pid, started_by in worker_pids().items() if started_by == own)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that its parent has yet to take note of has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
