"""What a step takes is measured exactly, and small steps tell what large ones take."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine import allocations
from npufleet_pod.engine.allocations import Peak, forget_process_peak, process_peak, record_allocations
from npufleet_pod.engine.device import CpuDevice, StreamDevice
from npufleet_pod.engine.fusion import MAX_SCORE_BYTES, DynamicFusionManager, FusionThresholds, score_bytes
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.rank_loading import take_cache
from npufleet_pod.engine.step_cache import StepCache
from npufleet_pod.engine.step_memory import greatest_attention, measure_step_memory
from npufleet_pod.models.fusion_plan import AttentionStrategy
from support.tiny_model import write_tiny_model
from support.tiny_model_decoder import load_tiny_decoder

MIB = 2**20


def test_a_peak_is_exact_to_the_byte_and_told_apart_from_what_is_held() -> None:
    with record_allocations() as found:
        first = torch.empty(1000, 1000)
        second = first.exp()
        del first
        third = second.exp()
        del second
    assert (found.peak_bytes, found.held_bytes) == (8_000_000, 4_000_000)
    assert (found.activation_bytes, found.scratch_bytes) == (8_000_000, 0)
    del third


def test_what_an_operation_takes_for_itself_is_scratch() -> None:
    values = torch.rand(1000, 1000)
    with record_allocations() as found:
        total = values.t().contiguous().softmax(1).double().var()
    assert found.scratch_bytes + found.activation_bytes == found.peak_bytes
    assert found.held_bytes == total.element_size()
    classes = torch.zeros(1000, dtype=torch.int64)
    with record_allocations() as scratch:
        torch.nn.functional.cross_entropy(values, classes)
    assert scratch.scratch_bytes >= 4_000_000
    assert scratch.activation_bytes < 1000


def test_recording_ends_with_an_error_and_begins_anew() -> None:
    with pytest.raises(RuntimeError), record_allocations():
        torch.ones(2) @ torch.ones(3)
    with record_allocations() as found:
        torch.empty(10)
    assert found.peak_bytes == 40


def test_the_process_may_not_be_asked_in_every_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(allocations, "PROCESS", tmp_path / "nowhere")
    assert forget_process_peak() is None
    assert process_peak() is None
    assert CpuDevice().measure_peak(lambda: torch.empty(MIB, dtype=torch.uint8)) == Peak(MIB)


def test_memory_taken_beside_torch_counts() -> None:
    peak = CpuDevice().measure_peak(lambda: (b"x" * (64 * MIB), torch.empty(10, dtype=torch.uint8)))
    assert peak.beside_bytes >= 60 * MIB
    assert peak.allocated_bytes == 10


class Namespace:
    """Counts as torch.npu does."""

    def __init__(self) -> None:
        self.allocated = self.peak = 100
        self.cached = 50

    def set_device(self, device: Any) -> None: ...

    def Stream(self, device: Any) -> object:  # noqa: N802 - torch's own name
        return object()

    def synchronize(self, device: Any) -> None: ...

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.allocated

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def empty_cache(self) -> None:
        self.cached = 0

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 1000 - self.allocated - self.cached, 1000

    def get_device_name(self, device: Any) -> str:
        return "Ascend910B3"


def test_a_device_of_its_own_counts_through_its_allocator() -> None:
    namespace = Namespace()
    device = StreamDevice("cpu", namespace)

    def work() -> None:
        namespace.peak = 700

    assert device.measure_peak(work) == Peak(600)
    assert (device.free_memory_bytes(), namespace.cached) == (900, 0)
    assert device.kind == "Ascend910B3"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2MoeForCausalLM"])
def test_two_small_steps_tell_what_a_large_one_takes(architecture: str, tmp_path: Path) -> None:
    decoder = load_tiny_decoder(write_tiny_model(tmp_path / "model", architecture=architecture, hidden_size=128))
    device, fusion = CpuDevice(), DynamicFusionManager(2, 4)
    tokens = 1024
    cache = take_cache(decoder, CacheLayout(16, 16, tokens // 16), device)
    memory = measure_step_memory(decoder, cache, device, fusion, tokens, 2048)
    ids = torch.arange(tokens) % 250
    positions = torch.arange(tokens)
    _, plan = fusion.order([tokens], [tokens])
    with torch.inference_mode(), record_allocations() as found:
        decoder.forward(ids, positions, [tokens], StepCache(cache, [slice(0, tokens)], positions), positions + 1, plan)
    assert found.peak_bytes <= memory.peak_bytes(tokens, 1) <= 2 * found.peak_bytes + 2 * MIB
    assert memory.forward.each * tokens > found.peak_bytes / 4, "most of it grows with the tokens"


@pytest.mark.parametrize("strategy", list(AttentionStrategy))
@pytest.mark.parametrize("heads", [4, 64, 128])
@pytest.mark.parametrize("thresholds", [FusionThresholds(), FusionThresholds(9000, 60000)])
def test_the_attention_that_is_measured_is_one_that_serving_may_choose(
    strategy: AttentionStrategy, heads: int, thresholds: FusionThresholds
) -> None:
    fusion = DynamicFusionManager(1, heads, thresholds)
    new_tokens, length = greatest_attention(fusion, heads, strategy, 65536, 131072)
    assert 1 <= new_tokens <= length
    assert score_bytes(strategy, heads, new_tokens, length) <= MAX_SCORE_BYTES
    if strategy is not AttentionStrategy.BLOCKED:
        assert fusion.strategy(new_tokens, length) in (strategy, AttentionStrategy.FULL)


def test_what_was_measured_is_logged(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    from npufleet_pod.engine.loading import load_engine
    from npufleet_pod.engine.model_files import inspect_model

    settings = EngineSettings.model_validate(
        {"model_path": str(tiny_model), "served_name": "m", "device": "CPU", "cpu_threads": 1, "max_num_batched_tokens": 1024}
    )
    files = inspect_model(settings)
    before = torch.get_num_threads()
    with caplog.at_level(logging.INFO):
        worker = threading.Thread(target=lambda: load_engine(settings, files, lambda: True).tiers.close())
        worker.start()
        worker.join()
    torch.set_num_threads(before)
    measured = next(record.__dict__ for record in caplog.records if record.message == "step measured")
    assert measured["bytes"] > measured["bytes_per_token"] * measured["tokens"] > 0
    assert (measured["tokens"], measured["sequences"]) == (1024, 64)


LIMITED = """
import json, sys
from npufleet_pod.engine import resources
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_api.settings import EngineSettings
from npufleet_pod.errors import DeviceError
host = resources.Host(resources.Path({cgroups!r}), resources.Path({membership!r}))
resources.available_memory_bytes.__defaults__ = (host,)
settings = EngineSettings.model_validate(json.loads(sys.argv[1]))
try:
    load_engine(settings, inspect_model(settings), lambda: True)
except DeviceError as error:
    print(error)
"""


def test_under_a_pods_limit_a_step_that_takes_too_much_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    fields = {"model_path": str(tiny_model), "served_name": "m", "device": "CPU", "cpu_threads": 1, "max_num_batched_tokens": 1048576}
    cgroup = tmp_path / "fs"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(str(256 * MIB))
    (cgroup / "memory.current").write_text(str(128 * MIB))
    (tmp_path / "cgroup").write_text("0::/")
    program = LIMITED.format(cgroups=str(cgroup), membership=str(tmp_path / "cgroup"))
    done = subprocess.run([sys.executable, "-c", program, json.dumps(fields)], capture_output=True, text=True, check=True, timeout=90)
    assert "16 tokens of KV do not fit the 128 MiB that are left, of which a step of 131072 tokens takes" in done.stdout
    assert "MiB are missing: raise the memory limit, or lower maxNumBatchedTokens" in done.stdout
