"""Makes a model ready to serve: device, dtype, weights, memory, warm-up. torch is imported only while loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.engine import LoadedEngine
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.limits import memory_limits
from npufleet_pod.engine.memory.errors import EngineMemoryError
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.profiles import scheduler_policy
from npufleet_pod.engine.tiering import open_tiers
from npufleet_pod.errors import DeviceError

logger = logging.getLogger(__name__)


def load_engine(settings: EngineSettings, files: ModelFiles, keep_going: Callable[[], bool]) -> LoadedEngine:
    """Load and warm up the model. Raises DeviceError or ModelError, LoadCancelledError once `keep_going` answers False."""
    started = time.monotonic()
    device = open_device(settings)

    import torch

    from npufleet_kernels.dispatch import select_kernels
    from npufleet_pod.engine.memory.kv_cache import ZeroCopyKVCache
    from npufleet_pod.engine.memory.kv_parts import PageOrder
    from npufleet_pod.engine.runner import ModelRunner
    from npufleet_pod.engine.warm_up import warm_up
    from npufleet_pod.models.checkpoint import open_checkpoint
    from npufleet_pod.models.decoder import load_decoder
    from npufleet_pod.models.dtypes import TORCH_DTYPES

    precision = files.precision
    kernels = select_kernels(device.torch_device.type)
    with open_checkpoint(files.path, TORCH_DTYPES[files.dtype], device.torch_device) as checkpoint:
        decoder = load_decoder(files.config, checkpoint, kernels, keep_going, precision=precision)
    limits = memory_limits(settings, files, device.free_memory_bytes())
    config, place = files.config, device.torch_device
    order = PageOrder.HEAD_MAJOR if place.type == "cpu" else PageOrder.PAGE_MAJOR
    try:
        cache = ZeroCopyKVCache(
            limits.layout,
            config.layers,
            config.kv_heads,
            config.head_size,
            TORCH_DTYPES[precision.kv_dtype],
            place,
            order,
            int8_heads=[len(heads) for heads in decoder.precision.int8_kv_heads],
        )
        runner = ModelRunner(decoder, cache, device, DynamicFusionManager(settings.fusion_level, config.heads))
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
            "precision": precision.describe(),
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
