from __future__ import annotations

import os
from pathlib import Path

import pytest

from npufleet_pod.engine.resources import Host, available_memory_bytes, cpu_count

GIB = 2**30


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {32 * 2**20} kB\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    return Host(tmp_path / "fs", tmp_path / "cgroup", tmp_path / "meminfo")


def write(host: Host, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = host.cgroup_root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/", {"cpu.max": "6400000 100000"}, 8),
        ("0::/pods/a", {"pods/cpu.max": "300000 100000", "pods/a/cpu.max": "max 100000"}, 3),
        ("0::/pods/a", {"pods/cpu.max": "300000 100000", "pods/a/cpu.max": "100000 100000"}, 1),
        ("4:cpu,cpuacct:/\n0::/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/kubepods/of-the-host", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/p\n1:memory:/", {"cpu/p/cpu.cfs_quota_us": "-1", "cpu/p/cpu.cfs_period_us": "100000"}, 8),
        ("0::/../..", {"cpu.max": "200000 100000"}, 2),
    ],
)
def test_threads_follow_the_tightest_cpu_quota(
    host: Host, membership: str, files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    host.proc_cgroup.write_text(membership + "\n")
    write(host, files)
    assert cpu_count(host) == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected_gib"),
    [
        ("0::/", {}, 32),
        ("0::/", {"memory.max": "max", "memory.current": str(GIB)}, 32),
        ("0::/", {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {2 * GIB}"}, 3),
        ("0::/", {"memory.max": str(4 * GIB), "memory.current": str(5 * GIB)}, 0),
        (
            "4:memory:/p",
            {"memory/p/memory.limit_in_bytes": str(4 * GIB), "memory/p/memory.usage_in_bytes": str(GIB)},
            3,
        ),
        ("4:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": str(GIB)}, 32),
    ],
)
def test_memory_is_what_host_and_cgroup_leave(host: Host, membership: str, files: dict[str, str], expected_gib: int) -> None:
    host.proc_cgroup.write_text(membership + "\n")
    write(host, files)
    assert available_memory_bytes(host) == expected_gib * GIB


def test_this_machine_answers_something_sensible() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))
    assert available_memory_bytes() > 0
