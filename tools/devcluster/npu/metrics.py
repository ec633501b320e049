"""The metrics of npu-exporter that devcluster imitates.

Names, labels and units: MindCluster, `docs/en/scheduling/api/npu_exporter/01_prometheus_metrics_api.md`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One gauge per card. `idle` is what a healthy, unused 910B3 shows."""

    name: str
    unit: str
    idle: float


_IDLE_HBM_MB = 3000.0  # `npu-smi info` of an unused card shows between 2.8 and 3.4 GB taken by the system

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("npu_chip_info_utilization", "percent of AI cores", 0),
        Metric("npu_chip_info_vector_utilization", "percent", 0),
        Metric("npu_chip_info_cube_utilization", "percent", 0),
        Metric("npu_chip_info_overall_utilization", "percent", 0),
        Metric("npu_chip_info_hbm_used_memory", "MB", _IDLE_HBM_MB),
        Metric("npu_chip_info_hbm_total_memory", "MB", 65536),
        Metric("npu_chip_info_hbm_utilization", "percent", 4),
        Metric("npu_chip_info_hbm_bandwidth_utilization", "percent", 0),
        Metric("npu_chip_info_hbm_temperature", "Celsius", 45),
        Metric("npu_chip_info_temperature", "Celsius", 48),
        Metric("npu_chip_info_power", "W", 96.6),
        Metric("npu_chip_info_voltage", "V", 0.9),
        Metric("npu_chip_info_aicore_current_freq", "MHz", 800),
        Metric("npu_chip_info_health_status", "1 good, 0 bad, -1 unknown", 1),
        Metric("npu_chip_info_network_status", "1 good, 0 bad, -1 unknown", 1),
        Metric("npu_chip_info_link_status", "1 good, 0 bad, -1 unknown", 1),
        Metric("npu_chip_info_bandwidth_rx", "MB/s", 0),
        Metric("npu_chip_info_bandwidth_tx", "MB/s", 0),
    )
}

CONTAINER_METRICS: dict[str, str] = {
    "container_npu_utilization": "npu_chip_info_utilization",
    "container_npu_used_memory": "npu_chip_info_hbm_used_memory",
    "container_npu_total_memory": "npu_chip_info_hbm_total_memory",
}
"""Metrics of cards that a container holds, to the card's metric that each repeats."""
