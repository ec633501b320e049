"""Metrics text of engines and of npu-exporter."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.monitor_support import EngineMetrics
from npufleet_monitor.collectors.engine import CumulativeHistogram, EngineSample, parse_engine
from npufleet_monitor.collectors.exposition import parse
from npufleet_monitor.collectors.npu_exporter import NpuFigures, parse_npus, visible_ids
from npufleet_monitor.errors import ScrapeError

LINE = st.one_of(
    st.text(max_size=60),
    st.from_regex(r"vllm:[a-z_]{1,12}(\{[a-z]{1,4}=\"[^\"\n]{0,6}\"\})? [-0-9.einfa+]{1,10}", fullmatch=True),
    st.from_regex(r"(vllm:time_to_first_token_seconds_bucket|npufleet:load_seconds|npu_chip_info_utilization).{0,40}", fullmatch=True),
    st.sampled_from(
        [
            'vllm:time_to_first_token_seconds_bucket{le="NaN"} 1',
            'vllm:time_to_first_token_seconds_bucket{le="x"} 1',
            'vllm:time_to_first_token_seconds_bucket{le="0.1"} -5',
            'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 1e308',
            "vllm:num_requests_running NaN",
            "vllm:num_requests_running -3",
            "vllm:num_requests_running 1e999",
            'npu_chip_info_hbm_used_memory{id="0",namespace="team-a",pod_name="r0"} 5',
            'npu_chip_info_hbm_total_memory{id="0",namespace="team-a",pod_name="r0"} 0',
            "# TYPE vllm:num_requests_running nonsense",
            "# HELP",
        ]
    ),
)


def test_cache_prefill_and_adapters_are_read_under_vllms_names() -> None:
    page = b"""
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",num_cpu_blocks="24"} 1
vllm:prefix_cache_queries_total{model_name="x"} 400
vllm:prefix_cache_hits_total{model_name="x"} 100
vllm:request_prefill_time_seconds_sum{model_name="x"} 2.5
vllm:lora_requests_info{running_lora_adapters="old",waiting_lora_adapters=""} 100
vllm:lora_requests_info{running_lora_adapters="sql, law",waiting_lora_adapters="code"} 200
"""
    sample = parse_engine(page)
    assert sample.kv_cache_tokens == 16 * 1024
    assert (sample.prefix_queries, sample.prefix_hits, sample.prefill_seconds) == (400, 100, 2.5)
    assert sample.adapters == ("code", "law", "sql")


@pytest.mark.parametrize("blocks", ['block_size="x",', 'block_size="nan",', 'block_size="-1",', 'block_size="1e300",', ""])
def test_a_cache_that_makes_no_sense_is_unknown(blocks: str) -> None:
    page = f'vllm:cache_config_info{{{blocks}num_gpu_blocks="1000",num_cpu_blocks="24"}} 1\n'
    assert parse_engine(page.encode()).kv_cache_tokens is None


def test_adapters_are_bounded() -> None:
    names = ",".join(f"a{n}" for n in range(1000))
    page = f'vllm:lora_requests_info{{running_lora_adapters="{names},{"x" * 300}"}} 1\n'
    assert len(parse_engine(page.encode()).adapters) == 64


def test_an_engines_page_is_read_under_vllms_names() -> None:
    engine = EngineMetrics()
    engine.running.set(3)
    engine.waiting.set(2)
    engine.kv.set(0.25)
    engine.prompt.inc(100)
    engine.generation.inc(40)
    engine.load.set(12.5)
    engine.most.set(32)
    engine.finish("stop", 3)
    engine.finish("timeout")
    engine.ttft.observe(0.05)
    engine.ttft.observe(9)
    sample = parse_engine(engine.page())
    assert sample == EngineSample(
        running=3,
        waiting=2,
        prompt_tokens=100,
        generation_tokens=40,
        kv_cache_percent=25,
        load_seconds=12.5,
        max_running=32,
        finished=4,
        timeouts=1,
        ttft=CumulativeHistogram((0.01, 0.1, 0.5, 1.0, 5.0), (0, 1, 1, 1, 1), 2),
        tpot=CumulativeHistogram((0.01, 0.1, 0.5, 1.0, 5.0), (0, 0, 0, 0, 0), 0),
    )


def test_what_an_engine_does_not_show_is_none_and_never_zero() -> None:
    assert parse_engine(b"") == EngineSample()
    assert parse_engine(b"python_gc_objects_collected_total 3\n") == EngineSample()


def test_names_are_matched_whole() -> None:
    text = b'vllm:num_requests_waiting_by_reason{reason="capacity"} 7\nvllm:num_requests_waiting 2\n'
    assert parse_engine(text).waiting == 2


def test_several_engines_are_summed_and_their_shares_are_the_fullest() -> None:
    text = b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
    text += b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
    sample = parse_engine(text)
    assert sample.running == 3
    assert sample.kv_cache_percent == pytest.approx(90)


@pytest.mark.parametrize("metric", ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"])
def test_tpot_is_found_under_the_new_and_the_old_name(metric: str) -> None:
    text = f'{metric}_bucket{{le="0.1"}} 4\n{metric}_bucket{{le="+Inf"}} 5\n'
    assert parse_engine(text.encode()).tpot == CumulativeHistogram((0.1,), (4,), 5)


def test_values_that_are_not_finite_are_left_out() -> None:
    assert parse(b"vllm:a NaN\nvllm:b +Inf\nvllm:c 1\n", ("vllm:",)).keys() == {"vllm:c"}


@pytest.mark.parametrize("raw", [b"\xff\xfe", *(b"vllm:num_requests_running" + rest for rest in (b"{ 1\n", b" x\n", b"\n"))])
def test_text_that_cannot_be_parsed_is_an_error_and_no_data(raw: bytes) -> None:
    with pytest.raises(ScrapeError):
        parse_engine(raw)


@given(st.lists(LINE, max_size=12).map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=300))
def test_any_text_is_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ScrapeError):
        sample = parse_engine(raw)
        assert sample.running is None or sample.running >= 0
        assert sample.kv_cache_percent is None or 0 <= sample.kv_cache_percent <= 100
        assert len(sample.ttft.bounds) == len(sample.ttft.counts)
    with contextlib.suppress(ScrapeError):
        npus = parse_npus(raw, namespace="team-a", pod_name="r0", ids=frozenset({"0"}))
        assert npus.compute_percent is None or 0 <= npus.compute_percent <= 100
        assert npus.memory_percent is None or 0 <= npus.memory_percent <= 100


def npu(name: str, number: int, value: float, pod: str = "", namespace: str = "") -> str:
    """A sample as npu-exporter shows it, with its timestamp."""
    labels = f'container_name="",id="{number}",model_name="910B3",namespace="{namespace}",pcie_bus_info="0000:61:00.0",pod_name="{pod}"'
    return f'{name}{{{labels},vdie_id="185011D4"}} {value} 1723621883587\n'


PAGE = "".join(
    npu("npu_chip_info_utilization", number, 10 * number, *owner)
    + npu("npu_chip_info_hbm_used_memory", number, 1000 * number, *owner)
    + npu("npu_chip_info_hbm_total_memory", number, 65536, *owner)
    + npu("npu_chip_info_health_status", number, 0 if number == 3 else 1, *owner)
    for number, owner in enumerate([("", ""), ("r0", "team-a"), ("r1", "team-a"), ("r0", "team-a"), ("r0", "team-b")])
).encode()


def test_figures_are_those_of_the_npus_that_the_exporter_gives_to_this_pod() -> None:
    found = parse_npus(PAGE, namespace="team-a", pod_name="r0")
    assert found.compute_percent == pytest.approx((10 + 30) / 2)
    assert found.memory_percent == pytest.approx(3000 * 100 / 65536)
    assert found.unhealthy == ("3",)


def test_without_pod_labels_the_visible_ids_count() -> None:
    found = parse_npus(PAGE, namespace="team-a", pod_name="unknown", ids=frozenset({"2"}))
    assert found.compute_percent == 20
    assert found.unhealthy == ()


def test_another_pods_npus_say_nothing() -> None:
    assert parse_npus(PAGE, namespace="team-a", pod_name="unknown") == NpuFigures()
    assert parse_npus(b"", namespace="team-a", pod_name="r0", ids=frozenset({"0"})) == NpuFigures()


def test_the_overall_utilisation_is_preferred_and_ddr_stands_in_for_hbm() -> None:
    page = npu("npu_chip_info_utilization", 0, 10, "r0", "team-a") + npu("npu_chip_info_overall_utilization", 0, 70, "r0", "team-a")
    page += npu("npu_chip_info_used_memory", 0, 50, "r0", "team-a") + npu("npu_chip_info_total_memory", 0, 100, "r0", "team-a")
    found = parse_npus(page.encode(), namespace="team-a", pod_name="r0")
    assert (found.compute_percent, found.memory_percent) == (70, 50)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("0", {"0"}),
        ("0,2-4", {"0", "2", "3", "4"}),
        ("Ascend910-0,Ascend910-7", {"0", "7"}),
        ("void", set()),
        ("", set()),
        ("all", set()),
        ("4-2", set()),
        ("x,1, 2 ", {"1", "2"}),
    ],
)
def test_visible_devices_are_read_as_the_ascend_runtime_writes_them(value: str, ids: set[str]) -> None:
    assert visible_ids(value) == ids


@given(st.text(max_size=40) | st.from_regex(r"[0-9]{1,6}-[0-9]{1,6}", fullmatch=True))
def test_any_list_of_devices_is_bounded(value: str) -> None:
    assert len(visible_ids(value)) <= 1025 * 40
