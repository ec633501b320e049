"""What a scrape of the pretend npu-exporter shows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from devcluster.npu.exporter import families
from devcluster.npu.metrics import METRICS
from devcluster.npu.state import NpuState
from devcluster.settings import NpuSettings

NPU = NpuSettings(count=2, memory_mb=32768)


class Once(Collector):
    def __init__(self, state: NpuState) -> None:
        self._state = state

    def collect(self) -> list[GaugeMetricFamily]:
        return list(families(self._state, NPU, 1723621883.5))


def scrape(state: NpuState) -> dict[tuple[str, str], float]:
    """(metric, card) to value, through the text format and back."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once(state))
    text = generate_latest(registry).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels.get("id", "")): sample.value for sample in samples}


def test_every_metric_shows_every_card_and_the_count_shows_once() -> None:
    found = scrape(NpuState())
    assert set(found) == {(name, card) for name in METRICS for card in ("0", "1")} | {("machine_npu_nums", "")}
    assert found["machine_npu_nums", ""] == 2
    assert found["npu_chip_info_hbm_total_memory", "1"] == 32768


def test_a_failed_card_is_unhealthy_and_values_set_by_hand_win() -> None:
    state = NpuState().with_failed(1).with_value("npu_chip_info_power", 0, 310.5)
    found = scrape(state)
    assert (found["npu_chip_info_health_status", "0"], found["npu_chip_info_health_status", "1"]) == (1, 0)
    assert found["npu_chip_info_power", "0"] == 310.5
    unknown = state.with_value("npu_chip_info_health_status", 1, -1)
    assert scrape(unknown)["npu_chip_info_health_status", "1"] == -1


def test_samples_carry_the_labels_and_timestamps_of_the_real_exporter() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once(NpuState()))
    line = next(text for text in generate_latest(registry).decode().splitlines() if text.startswith("npu_chip_info_utilization{"))
    assert line.startswith(
        'npu_chip_info_utilization{container_name="",id="0",model_name="910B3",namespace="",pcie_bus_info="0000:C1:00.0"'
    )
    assert line.endswith(" 1723621883500")
