"""One cgroup per cluster in every hierarchy, so that a cluster's leftovers can be found and removed."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import UnsupportedMachineError

_REMOVE_SECONDS = 10.0


@dataclass(frozen=True)
class Hierarchy:
    """A mounted cgroup hierarchy. `options` are the mount options that select it (empty for version 2)."""

    mount_point: Path
    version: int
    options: str


def parse_hierarchies(mountinfo: str) -> tuple[Hierarchy, ...]:
    """The hierarchies in the text of /proc/self/mountinfo; the first mount of each counts.

    Version 2 is taken only when it is the machine's only one: beside version 1 it holds no controllers.
    """
    version1: dict[str, Hierarchy] = {}
    version2: list[Hierarchy] = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        if not separator:
            continue
        mount_point = Path(left.split()[4])
        kind, _, super_options = right.split(maxsplit=2)
        if kind == "cgroup2":
            version2.append(Hierarchy(mount_point, 2, ""))
        elif kind == "cgroup":
            names = [o for o in super_options.split(",") if o not in ("rw", "ro", "xattr", "clone_children")]
            names = [o for o in names if not o.startswith("release_agent=")]
            options = ",".join((["none"] if any(o.startswith("name=") for o in names) else []) + names)
            version1.setdefault(options, Hierarchy(mount_point, 1, options))
    if version1:
        return tuple(version1.values())
    return tuple(version2[:1])


def hierarchies() -> tuple[Hierarchy, ...]:
    """What is mounted now; raises UnsupportedMachineError when nothing is."""
    found = parse_hierarchies(Path("/proc/self/mountinfo").read_text())
    if not found:
        raise UnsupportedMachineError("no cgroup file system is mounted; mount one at /sys/fs/cgroup")
    return found


def _group(name: str) -> str:
    return f"devcluster-{name}"


def enter(name: str, process_id: int, known: Iterable[Hierarchy]) -> None:
    """Create the cluster's cgroup in each hierarchy and move `process_id` into it."""
    for hierarchy in known:
        group = hierarchy.mount_point / _group(name)
        group.mkdir(exist_ok=True)
        if (group / "cpuset.cpus").exists() and hierarchy.version == 1:
            # A version 1 cpuset starts empty and refuses processes until both lists are filled.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((hierarchy.mount_point / file).read_text())
        (group / "cgroup.procs").write_text(str(process_id))


def processes(name: str) -> frozenset[int]:
    """Every process, in the caller's view, that is in the cluster's cgroups."""
    found: set[int] = set()
    for hierarchy in hierarchies():
        group = hierarchy.mount_point / _group(name)
        for folder in [group, *group.rglob("*/")] if group.is_dir() else []:
            try:
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                    raise
    return frozenset(found)


def remove(name: str) -> None:
    """Remove the cluster's cgroups, children first; waits while the kernel still reports exiting processes."""
    for hierarchy in hierarchies():
        group = hierarchy.mount_point / _group(name)
        if group.is_dir():
            _remove_tree(group, time.monotonic() + _REMOVE_SECONDS)


def _remove_tree(group: Path, deadline: float) -> None:
    for child in group.iterdir():
        if child.is_dir() and not child.is_symlink():
            _remove_tree(child, deadline)
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
