"""What rank 0 does with the others while the model loads: start, size, connect. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.distributed.group import RankGroup
from npufleet_pod.engine.distributed.messages import AttachHost, CacheTaken, Connect, Connected, Loaded, Start, TakeCache
from npufleet_pod.engine.limits import memory_limits
from npufleet_pod.engine.memory.layout import CacheLayout
from npufleet_pod.engine.model_files import ModelFiles
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.models.sharding import Span, shard

if TYPE_CHECKING:
    from npufleet_pod.engine.distributed.collective import SmartAllReduce


def start_group(settings: EngineSettings, files: ModelFiles) -> RankGroup:
    """Start every rank but 0; they load while rank 0 does."""
    level = logging.getLogger().getEffectiveLevel()

    def start(rank: int) -> Start:
        return Start(settings, files.path, files.config, files.precision, rank, level)

    return RankGroup(settings.tensor_parallel, settings.rank_timeout_seconds, start)


def group_limits(
    settings: EngineSettings,
    files: ModelFiles,
    group: RankGroup,
    free_bytes: Callable[[], int],
    step_bytes: int,
    keep_going: Callable[[], bool],
) -> SchedulerLimits:
    """What all ranks can hold once they are connected: on a CPU they share the host's memory, NPUs have their own and the smallest counts.

    step_bytes: what the largest step takes on this rank; the others' parts are no larger.
    """
    connected = group.collect(Connected, keep_going)
    token_bytes = [_kv_bytes_per_token(files, shard(files.config, rank, group.ranks).kv_heads) for rank in range(group.ranks)]
    own = free_bytes()
    if settings.device is Device.CPU:
        return memory_limits(settings, files, own, sum(token_bytes), step_bytes=group.ranks * step_bytes)
    free = [own, *(connected[rank].free_memory_bytes for rank in range(1, group.ranks))]
    limits = (memory_limits(settings, files, *one, step_bytes=step_bytes) for one in zip(free, token_bytes, strict=True))
    return min(limits, key=lambda limits: limits.kv_blocks)


def _kv_bytes_per_token(files: ModelFiles, kv_heads: Span) -> int:
    own = files.precision.for_heads(range(kv_heads.start, kv_heads.stop))
    return own.kv_bytes_per_token(kv_heads.count, files.config.head_size)


def connect_group(group: RankGroup, collective: SmartAllReduce, keep_going: Callable[[], bool]) -> None:
    """Connect all ranks once all have loaded: what a library takes of a device's memory for it is then not taken for KV."""
    from npufleet_pod.engine.distributed.collective import open_store

    group.collect(Loaded, keep_going)
    store = None if collective.connected else open_store(group.ranks, group.timeout_seconds)
    group.broadcast(lambda _: Connect(None if store is None else store.port))
    if store is not None:
        group.at_close(collective.close)
        with group.explained():
            collective.connect(store, group.timeout_seconds)


def take_group_caches(group: RankGroup, layout: CacheLayout, keep_going: Callable[[], bool]) -> list[int]:
    """Have each rank take the memory for its KV; gives the size of a page of each of the others, by rank."""
    group.broadcast(lambda _: TakeCache(layout))
    taken = group.collect(CacheTaken, keep_going)
    return [taken[rank].page_bytes for rank in range(1, group.ranks)]


def attach_group(group: RankGroup, size_bytes: int, page_bytes: Sequence[int]) -> None:
    """Give each rank its part of every slot of the shared host memory; page_bytes: by rank, 0 included."""
    group.broadcast(lambda rank: AttachHost(size_bytes, sum(page_bytes), sum(page_bytes[:rank])))
