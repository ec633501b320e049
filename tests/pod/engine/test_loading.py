from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from npufleet_api.model import Dtype
from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.distributed.leading import group_limits
from npufleet_pod.engine.distributed.messages import Connected
from npufleet_pod.engine.limits import check_weights_fit, memory_limits
from npufleet_pod.engine.model_files import compute_dtype, inspect_model
from npufleet_pod.errors import DeviceError

MIB = 2**20


def settings(model: Path, **fields: Any) -> EngineSettings:
    return EngineSettings.model_validate({"model_path": str(model), "served_name": "m", "device": "CPU", **fields})


def free_for(kv_bytes: float) -> int:
    """Memory in which so much KV fits: a tenth is kept, and a step may hold one of the two layers a second time."""
    return int(kv_bytes * 1.5 / 0.9)


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "device", "expected"),
    [
        (Dtype.AUTO, Dtype.BFLOAT16, Device.NPU, Dtype.BFLOAT16),
        (Dtype.AUTO, Dtype.BFLOAT16, Device.CPU, Dtype.FLOAT32),
        (Dtype.BFLOAT16, Dtype.FLOAT32, Device.CPU, Dtype.BFLOAT16),
        (Dtype.FLOAT32, Dtype.BFLOAT16, Device.NPU, Dtype.FLOAT32),
    ],
)
def test_dtype_follows_settings_then_device(wanted: Dtype, checkpoint: Dtype, device: Device, expected: Dtype) -> None:
    assert compute_dtype(wanted, checkpoint, device) is expected


def test_kv_blocks_are_what_memory_allows_and_the_sequences_can_use(tiny_model: Path) -> None:
    # 2 × 2 layers × 2 heads × 16 elements × 4 bytes × 64 tokens
    block_bytes = 2 * 2 * 2 * 16 * 4 * 64
    chosen = settings(tiny_model, max_num_sequences=2, block_size=64, prefix_cache=False)
    files = inspect_model(chosen)
    roomy = memory_limits(chosen, files, 1000 * MIB)
    assert (roomy.kv_blocks, roomy.max_model_length) == (2 * 2048 // 64, 2048)
    tight = memory_limits(chosen, files, free_for(10.5 * block_bytes))
    assert (tight.kv_blocks, tight.max_model_length) == (10, 640)


def test_a_prefix_cache_may_hold_as_much_again_as_running_requests_and_the_host_cache_is_not_counted_twice(tiny_model: Path) -> None:
    chosen = settings(tiny_model, max_num_sequences=2, block_size=64)
    assert memory_limits(chosen, inspect_model(chosen), 1000 * MIB).kv_blocks == 2 * 2 * 2048 // 64
    half = settings(tiny_model, max_num_sequences=2, block_size=64, host_cache_mi=2)
    block_bytes = 2 * 2 * 2 * 16 * 4 * 64
    assert memory_limits(half, inspect_model(half), 2 * MIB + free_for(10.5 * block_bytes)).kv_blocks == 10


def test_a_length_that_was_asked_for_is_never_cut_and_what_is_missing_is_told(tiny_model: Path) -> None:
    chosen = settings(tiny_model, max_model_length=2048)
    files = inspect_model(chosen)
    told = (
        "maxModelLength: 2048 tokens of KV do not fit the 10 MiB that are left, of which a step of 4096 tokens takes 9: 1 MiB are missing: "
        "raise the memory limit, or lower maxModelLength or maxNumBatchedTokens"
    )
    with pytest.raises(DeviceError, match=told):
        memory_limits(chosen, files, 10 * MIB, step_bytes=9 * MIB)
    assert memory_limits(chosen, files, 12 * MIB, step_bytes=9 * MIB).max_model_length == 2048


def test_memory_for_no_block_at_all_is_told(tiny_model: Path) -> None:
    chosen = settings(tiny_model)
    with pytest.raises(DeviceError, match="memory: 16 tokens of KV do not fit the 0 MiB that are left"):
        memory_limits(chosen, inspect_model(chosen), 1000)


def test_a_step_takes_its_part_of_the_memory_first(tiny_model: Path) -> None:
    chosen = settings(tiny_model, block_size=64, max_num_sequences=2)
    files = inspect_model(chosen)
    plain, beside = (memory_limits(chosen, files, free, step_bytes=step) for free, step in ((MIB, 0), (9 * MIB, 8 * MIB)))
    assert plain == beside


def test_weights_that_are_larger_than_the_memory_are_refused_before_they_are_read(tiny_model: Path) -> None:
    chosen = settings(tiny_model, dtype="BFloat16")
    files = inspect_model(chosen)
    size = (tiny_model / "model.safetensors").stat().st_size // 2
    check_weights_fit(chosen, files, size)
    with pytest.raises(DeviceError, match="memory: the weights take 0 MiB, 0 MiB are free, 1 MiB are missing: raise the memory limit"):
        check_weights_fit(chosen, files, size - 1)


def test_an_npu_that_is_not_there_is_never_replaced_by_a_cpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tiny_model, device="NPU")
    with pytest.raises(DeviceError, match="torch_npu, which is not installed: use the Ascend image, or set device CPU for development"):
        inspect_model(chosen)
    # As on a node whose driver is not mounted: the package is there, the device is not.
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(DeviceError, match="finds no NPU: check that the pod requests one"):
        open_device(chosen)


class PretendNpus:
    """torch.npu of a process that sees some NPUs, as far as opening one goes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.current: torch.device | None = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def set_device(self, device: torch.device) -> None:
        self.current = device

    def Stream(self, device: torch.device) -> object:  # noqa: N802 - torch's name
        return object()


def test_each_rank_opens_an_npu_of_its_own_and_too_few_are_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined] # as torch_npu does; not in torch's list of what it exports
    npus = PretendNpus(2)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", npus, raising=False)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "put back after the test")
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT")
    device = open_device(settings(tiny_model, device="NPU", tensor_parallel=2), rank=1)
    assert device.torch_device == npus.current == torch.device("npu", 1)
    assert device.collective_backend == "hccl"
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "600"
    with pytest.raises(DeviceError, match="tensorParallel: 4 ranks need as many NPUs, the process sees 2: request as many"):
        open_device(settings(tiny_model, device="NPU", tensor_parallel=4), rank=1)


class ConnectedGroup:
    """A group of two ranks that are connected."""

    ranks = 2

    def __init__(self, free_memory_bytes: int) -> None:
        self._report = Connected(free_memory_bytes)

    def collect(self, kind: type[Connected], keep_going: Callable[[], bool]) -> dict[int, Connected]:
        return {1: self._report}


def test_ranks_hold_what_the_fullest_npu_or_the_memory_that_they_share_allows(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank has one of two key/value heads: 2 × 2 layers × 16 elements × 4 bytes × 128 tokens of an NPU's page.
    page_bytes = 2 * 2 * 16 * 4 * 128
    fields: dict[str, Any] = {"tensor_parallel": 2, "block_size": 64, "dtype": "Float32"}
    files = inspect_model(settings(tiny_model, **fields))
    group: Any = ConnectedGroup(free_for(10.5 * page_bytes))
    on_npus = settings(tiny_model, device="NPU", **fields)
    assert group_limits(on_npus, files, group, lambda: 1000 * MIB, 0, lambda: True).kv_blocks == 10 * 2
    assert group_limits(on_npus, files, group, lambda: free_for(7.5 * page_bytes), 0, lambda: True).kv_blocks == 7 * 2
    # On a CPU only what rank 0 measures counts, and a page of both ranks lies in it: blocks of 64 tokens.
    shared = settings(tiny_model, **fields)
    assert group_limits(shared, files, group, lambda: free_for(10.5 * page_bytes), 0, lambda: True).kv_blocks == 10


def test_threads_are_those_of_the_settings(tiny_model: Path) -> None:
    before = torch.get_num_threads()
    try:
        open_device(settings(tiny_model, cpu_threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
