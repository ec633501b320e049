"""Makes a model ready to serve: device, dtype, weights, memory, warm-up. torch is imported only while loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from npufleet_api.settings import EngineSettings
from npufleet_pod.calibration import calibrated_for, check_calibration
from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.distributed.group import RankGroup
from npufleet_pod.engine.distributed.leading import attach_group, connect_group, group_limits, start_group, take_group_caches
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.limits import check_weights_fit, memory_limits
from npufleet_pod.engine.loaded import LoadedEngine, NoRanks
from npufleet_pod.engine.memory.errors import EngineMemoryError
from npufleet_pod.engine.memory.pool import HostRegion
from npufleet_pod.engine.memory.shared import SharedRegion
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.profiles import fusion_thresholds, scheduler_policy
from npufleet_pod.engine.tiering import MIB, Region, open_tiers
from npufleet_pod.errors import DeviceError

logger = logging.getLogger(__name__)


def load_engine(settings: EngineSettings, files: ModelFiles, keep_going: Callable[[], bool]) -> LoadedEngine:
    """Load and warm up the model, on as many ranks as the settings say.

    Raises DeviceError or ModelError, RankError or RankStartError for another rank, LoadCancelledError once `keep_going` answers False.
    """
    if settings.tensor_parallel == 1:
        return _load(settings, files, keep_going, None)
    with ExitStack() as undo:
        # First, so that the others import torch and read their parts at the same time.
        group = undo.enter_context(closing(start_group(settings, files)))
        loaded = _load(settings, files, keep_going, group)
        group.serving()
        undo.pop_all()
    return loaded


def _load(settings: EngineSettings, files: ModelFiles, keep_going: Callable[[], bool], group: RankGroup | None) -> LoadedEngine:
    started = time.monotonic()
    device = open_device(settings)
    if files.calibration is not None and settings.calibration_path is not None:
        served = calibrated_for(files.config, files.dtype, device.kind, settings.tensor_parallel)
        check_calibration(Path(settings.calibration_path), files.calibration, served)
    fusion = DynamicFusionManager(settings.fusion_level, files.config.heads, fusion_thresholds(files.calibration))

    import torch

    from npufleet_pod.engine.distributed.collective import SmartAllReduce
    from npufleet_pod.engine.rank import Rank
    from npufleet_pod.engine.rank_loading import load_part, take_cache
    from npufleet_pod.engine.runner import ModelRunner
    from npufleet_pod.engine.step_memory import largest_step_bytes
    from npufleet_pod.engine.warm_up import warm_up
    from npufleet_pod.models.decoder import ALONE

    check_weights_fit(settings, files, device.free_memory_bytes())
    collective = None if group is None else SmartAllReduce(0, group.ranks, group.progress, group.wiring, device)
    going = keep_going if group is None else group.watched(keep_going)
    decoder = load_part(files.config, files.path, files.precision, device, collective or ALONE, going)
    if group is not None and collective is not None:
        connect_group(group, collective, keep_going)
    try:
        step_bytes = largest_step_bytes(settings, files, decoder, device, fusion)
        if group is None:
            limits = memory_limits(settings, files, device.free_memory_bytes(), step_bytes=step_bytes)
        else:
            limits = group_limits(settings, files, group, device.free_memory_bytes, step_bytes, keep_going)
        cache = take_cache(decoder, limits.layout, device)
        page_bytes = [cache.page_bytes]
        if group is not None:
            page_bytes += take_group_caches(group, limits.layout, keep_going)
        runner = ModelRunner(Rank(decoder, cache, device), fusion, group)
        warm_up(runner, limits)

        def take_host(size_bytes: int) -> Region:
            return HostRegion(size_bytes) if group is None else SharedRegion(group.wiring.host, size_bytes)

        # Last, since the disk's worker has a thread that whoever gets the engine has to end.
        tiers = open_tiers(settings, sum(page_bytes), take=take_host)
    except EngineMemoryError as error:
        raise DeviceError(str(error)) from error
    if tiers.host is not None and tiers.host.buffer is not None:
        cache.attach_host(tiers.host.buffer, sum(page_bytes))
        if group is not None:
            attach_group(group, len(tiers.host.buffer), page_bytes)
    logger.info(
        "model loaded",
        extra={
            "architecture": files.config.architecture,
            "dtype": files.dtype.value,
            "precision": files.precision.describe(),
            "device": device.torch_device.type,
            "ranks": settings.tensor_parallel,
            "threads": torch.get_num_threads(),
            "max_model_length": limits.max_model_length,
            "kv_blocks": limits.kv_blocks,
            "kv_block_tokens": limits.kv_block_tokens,
            "step_mib": round(step_bytes / MIB, 1),
            "fusion_level": fusion.level,
            "fusion_thresholds": asdict(fusion.thresholds),
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
        ranks=group or NoRanks(),
    )
