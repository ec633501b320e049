"""Reserved huge pages that the process may use: what the kernel has free, cut to the cgroups' limits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from npufleet_pod.engine.resources import Host

HUGE_PAGE_KIB = 2048
THIS_HOST = Host()
LIMIT_FILES = (
    ("hugetlb.2MB.max", "hugetlb.2MB.current"),
    ("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes"),
)
"""Limit and usage, of cgroup versions 2 and 1."""


def available_huge_page_bytes(host: Host = THIS_HOST) -> int:
    """Bytes of reserved 2 MiB pages that are free and allowed; 0 where the kernel's default size is another, or its files are not shown."""
    words = {name: value.split() for name, _, value in (line.partition(":") for line in _read(host.meminfo).splitlines())}
    if words.get("Hugepagesize", ["0"])[0] != str(HUGE_PAGE_KIB):
        return 0
    free = int(words.get("HugePages_Free", ["0"])[0]) - int(words.get("HugePages_Rsvd", ["0"])[0])
    available = max(0, free) * HUGE_PAGE_KIB * 1024
    for limit, usage in _limits(host):
        available = min(available, max(0, limit - usage))
    return available


def _limits(host: Host) -> Iterator[tuple[int, int]]:
    for line in _read(host.proc_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "hugetlb" not in controllers.split(","):
            continue
        root = host.cgroup_root / "hugetlb" if controllers else host.cgroup_root
        folder = root / path.lstrip("/")
        for place in (folder, *(parent for parent in folder.parents if parent == root or root in parent.parents)):
            for limit_file, usage_file in LIMIT_FILES:
                limit = _read(place / limit_file)
                if limit and limit != "max":
                    yield int(limit), int(_read(place / usage_file) or 0)


def _read(path: Path) -> str:
    """The file's text; empty where a kernel or container does not show it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
