"""Makes a model ready to serve: device, dtype, weights, memory, warm-up. torch is imported only while loading."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npufleet_api.model import Dtype
from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.engine import LoadedEngine
from npufleet_pod.engine.memory.errors import EngineMemoryError
from npufleet_pod.engine.memory.sizing import KVBudget, kv_page_count
from npufleet_pod.engine.profiles import scheduler_policy
from npufleet_pod.engine.resources import cpu_count
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.engine.tiering import MIB, open_tiers
from npufleet_pod.errors import DeviceError, ModelError, SettingsError
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from npufleet_pod.engine.device import Device as ComputeDevice

logger = logging.getLogger(__name__)

KV_MEMORY_SHARE = 0.8
"""Share of the memory left after loading that KV may take; activations and the allocator's slack take the rest."""
CACHED_SHARE = 2
"""With a prefix cache, up to so many times the KV that running requests can hold is of use."""
NPU_PAGE_TOKENS = 128
"""Tokens of a page that the NPU's attention addresses (vllm-ascend's block size); a page holds whole blocks."""
MIN_MODEL_LENGTH = 16
DTYPE_BYTES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What can be read of a model without torch, in well under a second."""

    path: Path
    config: DecoderConfig
    tokenizer: TextTokenizer
    dtype: Dtype
    max_model_length: int
    """What the settings ask for, else the model's own limit; memory may allow less."""


def inspect_model(settings: EngineSettings) -> ModelFiles:
    """Check all that needs no torch, so that a mistake is told at once. Raises SettingsError, DeviceError or ModelError."""
    if settings.tensor_parallel > 1:
        raise SettingsError(f"tensorParallel: {settings.tensor_parallel} is not served by this release: set it to 1")
    if settings.device is Device.NPU and importlib.util.find_spec("torch_npu") is None:
        raise DeviceError("device: NPU needs torch_npu, which is not installed: use the Ascend image, or set device CPU for development")
    path = Path(settings.model_path)
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path}: tokenizer.json has {tokenizer.vocab_size} tokens, config.json's vocab_size is {config.vocab_size}: "
            "use the tokenizer that belongs to the weights"
        )
    wanted = settings.max_model_length
    if wanted is not None and wanted > config.max_positions:
        raise SettingsError(
            f"maxModelLength: {wanted} is beyond the model's max_position_embeddings {config.max_positions}: lower maxModelLength"
        )
    dtype = compute_dtype(settings.dtype, config.checkpoint_dtype, settings.device)
    return ModelFiles(path, config, tokenizer, dtype, wanted or config.max_positions)


def compute_dtype(wanted: Dtype, checkpoint: Dtype, device: Device) -> Dtype:
    """Type of weights, activations and KV.

    Auto is the checkpoint's on an NPU. On a CPU it is Float32: few CPUs multiply bfloat16 faster than float32 (those with AMX or
    AVX512-BF16), and in float32 an answer does not depend on the batch it was computed in.
    """
    if wanted is not Dtype.AUTO:
        return wanted
    return Dtype.FLOAT32 if device is Device.CPU else checkpoint


def load_engine(settings: EngineSettings, files: ModelFiles, keep_going: Callable[[], bool]) -> LoadedEngine:
    """Load and warm up the model. Raises DeviceError or ModelError, LoadCancelledError once `keep_going` answers False."""
    started = time.monotonic()
    device = open_device(settings)

    import torch

    from npufleet_kernels.dispatch import select_kernels
    from npufleet_pod.engine.memory.kv_cache import PageOrder, ZeroCopyKVCache
    from npufleet_pod.engine.runner import ModelRunner
    from npufleet_pod.engine.warm_up import warm_up
    from npufleet_pod.models.checkpoint import open_checkpoint
    from npufleet_pod.models.decoder import load_decoder

    dtype = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}[files.dtype]
    kernels = select_kernels(device.torch_device.type)
    with open_checkpoint(files.path, dtype, device.torch_device) as checkpoint:
        decoder = load_decoder(files.config, checkpoint, kernels, keep_going)
    limits = memory_limits(settings, files, device.free_memory_bytes())
    config, place = files.config, device.torch_device
    order = PageOrder.HEAD_MAJOR if place.type == "cpu" else PageOrder.PAGE_MAJOR
    try:
        cache = ZeroCopyKVCache(limits.layout, config.layers, config.kv_heads, config.head_size, dtype, place, order)
        runner = ModelRunner(decoder, cache, device)
        warm_up(runner, limits)
        # Last, since the disk's worker has a thread that whoever gets the engine has to end.
        tiers = open_tiers(settings, cache.page_bytes)
    except EngineMemoryError as error:
        raise DeviceError(str(error)) from error
    if tiers.host is not None and tiers.host.buffer is not None:
        cache.attach_host(tiers.host.buffer)
    logger.info(
        "model loaded",
        extra={
            "architecture": files.config.architecture,
            "dtype": files.dtype.value,
            "device": device.torch_device.type,
            "threads": torch.get_num_threads(),
            "max_model_length": limits.max_model_length,
            "kv_blocks": limits.kv_blocks,
            "kv_block_tokens": limits.kv_block_tokens,
            "profile": settings.profile.value,
            "load_seconds": round(time.monotonic() - started, 3),
        },
    )
    return LoadedEngine(
        runner,
        limits,
        files.config.eos_token_ids,
        files.tokenizer.decode,
        policy=scheduler_policy(settings),
        prefix_cache=settings.prefix_cache and not files.config.rope_depends_on_length,
        tiers=tiers,
    )


def open_device(settings: EngineSettings) -> ComputeDevice:
    """The device that the settings name, ready for use. Raises DeviceError rather than take another one."""
    # OpenMP reads it when torch loads it. Threads that spin at a barrier take the CPU from the one they wait for: where a pod shares
    # its cores, decoding was 2 to 10 times slower, and on a quiet machine it was no faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import torch

    from npufleet_pod.engine.device import CpuDevice, StreamDevice

    if settings.device is Device.NPU:
        import torch_npu  # type: ignore[import-not-found, unused-ignore] # noqa: F401 - only in the Ascend image; registers torch.npu

        npu = getattr(torch, "npu", None)
        if npu is None or not npu.is_available() or npu.device_count() < 1:
            raise DeviceError(
                "device: NPU finds no NPU: check that the pod requests one and that the driver is mounted, "
                "or set device CPU for development"
            )
        return StreamDevice("npu", npu)
    torch.set_num_threads(settings.cpu_threads or cpu_count())
    return CpuDevice()


def memory_limits(settings: EngineSettings, files: ModelFiles, free_bytes: int) -> SchedulerLimits:
    """Bounds of the scheduler where `free_bytes` are left after loading. Raises DeviceError if the asked length does not fit."""
    block_tokens = int(settings.block_size)
    page_blocks = NPU_PAGE_TOKENS // block_tokens if settings.device is Device.NPU else 1
    page_tokens = block_tokens * page_blocks
    page_bytes = files.config.kv_elements_per_token * DTYPE_BYTES[files.dtype] * page_tokens
    if settings.device is Device.CPU:
        free_bytes = max(0, free_bytes - settings.host_cache_mi * MIB)
    useful = settings.max_num_sequences * -(-files.max_model_length // page_tokens) * (CACHED_SHARE if settings.prefix_cache else 1)
    pages = kv_page_count(KVBudget(free_bytes, 0, KV_MEMORY_SHARE), page_bytes, useful_pages=useful, min_pages=0)
    held = pages * page_tokens
    if settings.max_model_length is not None and held < settings.max_model_length:
        raise DeviceError(
            f"maxModelLength: {settings.max_model_length} tokens of KV do not fit the {free_bytes // 2**20} MiB that are left, "
            f"which hold {held}: lower maxModelLength or raise the memory limit"
        )
    if held < MIN_MODEL_LENGTH:
        raise DeviceError(f"memory: {free_bytes // 2**20} MiB are left after loading, too little for any KV: raise the memory limit")
    if held < files.max_model_length:
        logger.warning("memory holds less than the model's length", extra={"model_length": files.max_model_length, "kv_tokens": held})
    return SchedulerLimits(
        max_num_sequences=settings.max_num_sequences,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_model_length=min(files.max_model_length, held),
        kv_blocks=pages * page_blocks,
        kv_block_tokens=block_tokens,
        kv_page_blocks=page_blocks,
    )
