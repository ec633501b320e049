"""What the scheduler's tests share: schedulers over real bookkeeping of memory, and steps that compute nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from npufleet_api.model import Preemption, SchedulingPolicy
from npufleet_pod.engine.memory.layout import CacheLayout, Copy, Load, Store, Transfer
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier, InlineWorker
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from npufleet_pod.engine.step import Step

AGGRESSIVE, CONSERVATIVE = Preemption.AGGRESSIVE, Preemption.CONSERVATIVE
LATENCY, THROUGHPUT = SchedulingPolicy.LATENCY_OPTIMISED, SchedulingPolicy.THROUGHPUT_OPTIMISED
SLOT_BYTES = 8
_numbers = itertools.count(1)


def limits(**changes: int) -> SchedulerLimits:
    """Small bounds: 4 sequences, 16 tokens a step, blocks of 16."""
    fields = {
        "max_num_sequences": 4,
        "max_num_batched_tokens": 16,
        "max_queued_requests": 8,
        "max_model_length": 256,
        "kv_blocks": 100,
        "kv_block_tokens": 16,
    }
    return SchedulerLimits(**{**fields, **changes})


class Ticks:
    """A clock that moves whenever it is asked."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        self._seconds += 1
        return self._seconds


class PageFiles:
    """A store of pages in memory, behind the disk tier. `device` says what the host's slots hold."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def write(self, digest: bytes, data: memoryview) -> None:
        """Keep a copy."""
        self.held[digest] = bytes(data)

    def read(self, digest: bytes, into: memoryview) -> None:
        """Bring it back."""
        into[:] = self.held[digest]

    def delete(self, digest: bytes) -> None:
        """Forget it."""
        self.held.pop(digest, None)


def host_tier(layout: CacheLayout, pages: int) -> HostTier | None:
    """Room for so many pages in the host's memory."""
    size = layout.page_tokens * SLOT_BYTES
    return HostTier(pages, size, memoryview(bytearray(pages * size))) if pages else None


def new_scheduler(
    bounds: SchedulerLimits | None = None,
    *,
    prefix_cache: bool = False,
    host: HostTier | None = None,
    disk_pages: int = 0,
    **policy: Any,
) -> Scheduler:
    """A scheduler with memory of its own."""
    bounds, clock = bounds or limits(), Ticks()
    disk = DiskTier(PageFiles(), InlineWorker(), disk_pages, clock) if disk_pages else None
    memory = KVCacheManager(bounds.layout, clock, prefix_caching=prefix_cache, host=host, disk=disk)
    return Scheduler(bounds, SchedulerPolicy(**policy), memory)


def prompt(length: int) -> list[int]:
    """Tokens that no other prompt has."""
    return [next(_numbers) for _ in range(length)]


def commit(scheduler: Scheduler, step: Step, *finished: str) -> None:
    """End a step; each of its samples gets a token."""
    if step.tokens:
        scheduler.commit(step, dict.fromkeys(step.samples, 7), finished)


def run_step(scheduler: Scheduler, *finished: str) -> Step:
    """Decide a step and end it."""
    step = scheduler.schedule()
    commit(scheduler, step, *finished)
    return step


class DeviceModel:
    """The device's memory: every slot holds the number that was written to it last. The host's slots are the tier's own buffer."""

    def __init__(self, layout: CacheLayout, host: HostTier | None) -> None:
        self._tokens = layout.page_tokens
        self._host = host
        self._pages = [bytearray(self._tokens * SLOT_BYTES) for _ in range(layout.page_count)]

    def execute(self, transfers: Sequence[Transfer]) -> None:
        """Move pages as the engine's KV cache does."""
        for transfer in transfers:
            match transfer:
                case Copy(source, target, tokens):
                    self._pages[target][: tokens * SLOT_BYTES] = self._pages[source][: tokens * SLOT_BYTES]
                case Store(page, slot):
                    self._slot(slot)[:] = self._pages[page]
                case Load(slot, page):
                    self._pages[page][:] = self._slot(slot)

    def write(self, pages: Sequence[int], start: int, values: Sequence[int]) -> None:
        """Put `values` where the tokens from `start` on lie."""
        for token, value in enumerate(values, start):
            offset = token % self._tokens * SLOT_BYTES
            self._pages[pages[token // self._tokens]][offset : offset + SLOT_BYTES] = value.to_bytes(SLOT_BYTES, "little", signed=True)

    def read(self, pages: Sequence[int], count: int) -> list[int]:
        """What lies where the first `count` tokens lie."""
        slots = ((pages[token // self._tokens], token % self._tokens * SLOT_BYTES) for token in range(count))
        return [int.from_bytes(self._pages[page][offset : offset + SLOT_BYTES], "little", signed=True) for page, offset in slots]

    def _slot(self, number: int) -> memoryview:
        assert self._host is not None, "pages move to a host tier that there is none of"
        return self._host.view(number)
