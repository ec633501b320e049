"""What a scrape of the pretend npu-exporter shows."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from devcluster.npu import podresources_pb2 as pb
from devcluster.npu.exporter import families
from devcluster.npu.metrics import CONTAINER_METRICS, METRICS
from devcluster.npu.owners import Owner, owners_in
from devcluster.npu.state import NpuState
from devcluster.settings import NpuSettings

NPU = NpuSettings(count=2, memory_mb=32768)


class Once(Collector):
    def __init__(self, state: NpuState, owners: Mapping[int, Owner] | None = None) -> None:
        self._state = state
        self._owners = owners or {}

    def collect(self) -> list[GaugeMetricFamily]:
        return list(families(self._state, NPU, self._owners, 1723621883.5))


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


def test_a_card_that_a_container_holds_carries_its_name_and_has_container_metrics() -> None:
    registry = CollectorRegistry(auto_describe=False)
    state = NpuState().with_value("npu_chip_info_utilization", 1, 63)
    registry.register(Once(state, {1: Owner("team-a", "qwen-0", "engine")}))
    found = [s for family in text_string_to_metric_families(generate_latest(registry).decode()) for s in family.samples]
    container = {s.name: s for s in found if s.name in CONTAINER_METRICS}
    assert set(container) == set(CONTAINER_METRICS)
    assert container["container_npu_utilization"].value == 63
    held = [s for s in found if s.labels.get("pod_name") == "qwen-0"]
    assert {s.labels["id"] for s in held} == {"1"}
    assert {(s.labels["namespace"], s.labels["container_name"]) for s in held} == {("team-a", "engine")}


def test_the_kubelets_answer_is_read_for_our_resource_only() -> None:
    def devices(resource: str, *ids: str) -> pb.ContainerDevices:
        return pb.ContainerDevices(resource_name=resource, device_ids=ids)

    ours, theirs = devices("huawei.com/Ascend910", "Ascend910-3", "Ascend910-0"), devices("example.com/other", "x-1")
    pods = [
        pb.PodResources(name="p", namespace="n", containers=[pb.ContainerResources(name="c", devices=[theirs, ours])]),
        pb.PodResources(name="q", namespace="n", containers=[pb.ContainerResources(name="c")]),
    ]
    assert owners_in(pods, "huawei.com/Ascend910") == {0: Owner("n", "p", "c"), 3: Owner("n", "p", "c")}
