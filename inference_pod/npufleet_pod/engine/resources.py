"""What the container may use: CPUs and memory, from cgroups (v1 and v2) and the kernel. Imports no torch.

A pod with a CPU limit must not start a compute thread per host core: they would share the limit's few CPUs and be throttled together.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes a number near 2**63 for no limit."""


MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Host:
    """Where the kernel's files are; tests put their own there."""

    cgroup_root: Path = Path("/sys/fs/cgroup")
    proc_cgroup: Path = Path("/proc/self/cgroup")
    meminfo: Path = Path("/proc/meminfo")
    cpuinfo: Path = Path("/proc/cpuinfo")


def cpu_count(host: Host = Host()) -> int:
    """CPUs that the process may keep busy: the affinity mask, cut to the tightest cgroup quota (rounded up), at least 1."""
    count = len(os.sched_getaffinity(0))
    for quota in _cpu_quotas(host):
        count = min(count, max(1, math.ceil(quota)))
    return count


def cpu_model(host: Host = Host()) -> str:
    """What the processor calls itself; its architecture where it has no name, as on many of Arm's."""
    for line in _read(host.cpuinfo).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()[:MAX_NAME_CHARS]
    return platform.machine() or "unknown"


def available_memory_bytes(host: Host = Host()) -> int:
    """Memory that the process can still take: of the host, and of the tightest cgroup; page cache counts as free."""
    free = _host_available_bytes(host)
    for limit, used in _memory_limits(host):
        free = min(free, max(0, limit - used))
    return free


def _cpu_quotas(host: Host) -> Iterator[float]:
    for folder in _folders(host, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


def _memory_limits(host: Host) -> Iterator[tuple[int, int]]:
    for folder in _folders(host, "memory"):
        statistics = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
        for limit_file, usage_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit and usage and limit != "max" and int(limit) < UNLIMITED_BYTES:
                yield int(limit), int(usage) - int(statistics.get(cache, 0))


def _folders(host: Host, controller: str) -> Iterator[Path]:
    """The process's cgroup of each hierarchy and all its ancestors: every limit on the way counts."""
    for line in _read(host.proc_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 mounts each controller in a folder of its own; a container sees its own cgroup as the root.
        root = host.cgroup_root / controller if controllers else host.cgroup_root
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _host_available_bytes(host: Host) -> int:
    for line in _read(host.meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNLIMITED_BYTES


def _read(path: Path) -> str:
    """The file's text; empty where a kernel or container does not show it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
