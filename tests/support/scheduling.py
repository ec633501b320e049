"""What the scheduler's tests share: schedulers over real bookkeeping of memory, and steps that compute nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from npufleet_api.model import Preemption, SchedulingPolicy
from npufleet_pod.engine.paging import CacheLayout, KVCacheManager, PageTable
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from npufleet_pod.engine.step import Step

AGGRESSIVE, CONSERVATIVE = Preemption.AGGRESSIVE, Preemption.CONSERVATIVE
LATENCY, THROUGHPUT = SchedulingPolicy.LATENCY_OPTIMISED, SchedulingPolicy.THROUGHPUT_OPTIMISED
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


def new_scheduler(bounds: SchedulerLimits | None = None, **policy: Any) -> Scheduler:
    """A scheduler with memory of its own."""
    bounds = bounds or limits()
    return Scheduler(bounds, SchedulerPolicy(**policy), KVCacheManager(bounds.layout))


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
    """The device's memory: every slot holds what was written to it last."""

    def __init__(self, layout: CacheLayout) -> None:
        self._tokens = layout.page_tokens
        self._pages: dict[int, list[Any]] = {page: [None] * layout.page_tokens for page in range(layout.page_count)}

    def write(self, table: PageTable, start: int, values: Sequence[Any]) -> None:
        """Put `values` where the tokens from `start` on lie."""
        for token, value in enumerate(values, start):
            self._pages[table.pages[token // self._tokens]][token % self._tokens] = value

    def read(self, table: PageTable, count: int) -> list[Any]:
        """What lies where the first `count` tokens lie."""
        return [self._pages[table.pages[token // self._tokens]][token % self._tokens] for token in range(count)]
