"""What npu-exporter tells about this pod's NPUs. Pure.

Names and units by MindCluster's npu-exporter (port 8082): utilisation in percent, memory in MB, health 1 good, 0 bad, -1 unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from npufleet_monitor.collectors.exposition import Samples, parse

PREFIXES = ("npu_chip_info_", "container_npu_")
COMPUTE = ("npu_chip_info_overall_utilization", "npu_chip_info_utilization", "container_npu_utilization")
MEMORY = (
    ("npu_chip_info_hbm_used_memory", "npu_chip_info_hbm_total_memory"),
    ("npu_chip_info_used_memory", "npu_chip_info_total_memory"),
    ("container_npu_used_memory", "container_npu_total_memory"),
)
HEALTH = "npu_chip_info_health_status"
MAX_IDS = 1024
DEVICE_ID = re.compile(r"(?:[A-Za-z][A-Za-z0-9]*-)?([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class NpuFigures:
    """This pod's NPUs together: compute is their mean, memory that of the fullest, which is what fails first."""

    compute_percent: float | None = None
    memory_percent: float | None = None
    unhealthy: tuple[str, ...] = ()
    """Ids of NPUs whose health is bad."""


def visible_ids(value: str) -> frozenset[str]:
    """NPU ids in ASCEND_VISIBLE_DEVICES: `0,2-4`, `Ascend910-0`; `void`, `all` and what is not understood give none."""
    ids: set[str] = set()
    for part in value.split(","):
        found = DEVICE_ID.fullmatch(part.strip())
        if found is None:
            continue
        first = int(found.group(1))
        last = int(found.group(2)) if found.group(2) else first
        ids.update(str(number) for number in range(first, min(last, first + MAX_IDS) + 1))
    return frozenset(ids)


def parse_npus(raw: bytes, *, namespace: str, pod_name: str, ids: frozenset[str] = frozenset()) -> NpuFigures:
    """Figures of the NPUs that the exporter attributes to this pod, else of those in `ids`; an empty result if it shows none.

    Without either nothing is taken: another pod's NPUs say nothing about this one. Raises ScrapeError.
    """
    samples = parse(raw, PREFIXES)
    own = _attributed(samples, namespace, pod_name) or ids

    def mine(name: str) -> dict[str, float]:
        return {s.labels["id"]: s.value for s in samples.get(name, ()) if s.labels.get("id") in own}

    compute = _first(mine(name) for name in COMPUTE)
    memory = _first(_memory_percents(mine(used), mine(total)) for used, total in MEMORY)
    return NpuFigures(
        compute_percent=_clamp(sum(compute.values()) / len(compute)) if compute else None,
        memory_percent=_clamp(max(memory.values())) if memory else None,
        unhealthy=tuple(sorted(npu for npu, value in mine(HEALTH).items() if value == 0)),
    )


def _attributed(samples: Samples, namespace: str, pod_name: str) -> frozenset[str]:
    every = (sample for found in samples.values() for sample in found)
    return frozenset(
        s.labels["id"]
        for s in every
        if s.labels.get("namespace") == namespace and s.labels.get("pod_name") == pod_name and s.labels.get("id")
    )


def _memory_percents(used: dict[str, float], total: dict[str, float]) -> dict[str, float]:
    return {npu: used[npu] * 100 / total[npu] for npu in used if total.get(npu, 0) > 0}


def _first(candidates: Iterable[dict[str, float]]) -> dict[str, float]:
    return next((found for found in candidates if found), {})


def _clamp(percent: float) -> float:
    return min(100.0, max(0.0, percent))
