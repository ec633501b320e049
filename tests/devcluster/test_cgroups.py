"""Reading which cgroup hierarchies a machine has."""

from __future__ import annotations

from pathlib import Path

from devcluster.cgroups import Hierarchy, parse_hierarchies

VERSION_1 = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,release_agent=/lib/x,name=systemd
34 30 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
35 30 0:28 / /other/memory rw,relatime - cgroup cgroup rw,memory
"""
VERSION_2 = "29 21 0:25 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def test_version_1_hierarchies_are_told_apart_by_their_controllers() -> None:
    assert parse_hierarchies(VERSION_1) == (
        Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), 1, "cpu,cpuacct"),
        Hierarchy(Path("/sys/fs/cgroup/memory"), 1, "memory"),
        Hierarchy(Path("/sys/fs/cgroup/systemd"), 1, "none,name=systemd"),
    )


def test_version_2_counts_where_it_stands_alone() -> None:
    assert parse_hierarchies(VERSION_2) == (Hierarchy(Path("/sys/fs/cgroup"), 2, ""),)


def test_a_machine_without_cgroups_has_none() -> None:
    assert parse_hierarchies("21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\nnot a line\n") == ()
