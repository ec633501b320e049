"""A pretend npu-exporter: real metric names and labels, values from the state file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from devcluster.npu.metrics import CONTAINER_METRICS, METRICS
from devcluster.npu.owners import Kubelet, Owner
from devcluster.npu.state import NpuState, read
from devcluster.settings import NpuSettings

PORT = 8082
_LABELS = ("id", "model_name", "vdie_id", "pcie_bus_info", "namespace", "pod_name", "container_name")
_NOBODY = Owner("", "", "")
_HEALTH = "npu_chip_info_health_status"
_HBM_TOTAL = "npu_chip_info_hbm_total_memory"


def value_of(metric: str, card: int, state: NpuState, npu: NpuSettings) -> float:
    """What the exporter shows for one card: a value set by hand, else the card's health and size, else idle."""
    given = state.values.get(metric, {}).get(card)
    if given is not None:
        return given
    if metric == _HEALTH and card in state.failed:
        return 0.0
    if metric == _HBM_TOTAL:
        return float(npu.memory_mb)
    return METRICS[metric].idle


def families(state: NpuState, npu: NpuSettings, owners: Mapping[int, Owner], now_seconds: float) -> Iterable[GaugeMetricFamily]:
    """All samples, with labels and timestamps as the real exporter gives them; `owners` says which container holds a card."""

    def labels(card: int) -> tuple[str, ...]:
        owner = owners.get(card, _NOBODY)
        identity = (str(card), npu.chip_name, f"DE0C-{card:08X}", f"0000:{0xC1 + card:02X}:00.0")
        return (*identity, owner.namespace, owner.pod, owner.container)

    count = GaugeMetricFamily("machine_npu_nums", "number of cards")
    count.add_metric((), npu.count, timestamp=now_seconds)
    yield count
    for name, metric in METRICS.items():
        family = GaugeMetricFamily(name, metric.unit, labels=_LABELS)
        for card in range(npu.count):
            family.add_metric(labels(card), value_of(name, card, state, npu), timestamp=now_seconds)
        yield family
    for name, source in CONTAINER_METRICS.items():
        family = GaugeMetricFamily(name, METRICS[source].unit, labels=_LABELS)
        for card in sorted(owners):
            family.add_metric(labels(card), value_of(source, card, state, npu), timestamp=now_seconds)
        yield family


class _Cards(Collector):
    def __init__(self, state_file: Path, npu: NpuSettings, kubelet: Kubelet) -> None:
        self._state_file = state_file
        self._npu = npu
        self._kubelet = kubelet

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return families(read(self._state_file), self._npu, self._kubelet.owners(), time.time())


def serve(address: str, state_file: Path, npu: NpuSettings, kubelet: Kubelet) -> None:
    """Serve `/metrics` on port 8082 of `address` from a thread of its own, for as long as the process lives."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Cards(state_file, npu, kubelet))
    start_http_server(PORT, address, registry)
