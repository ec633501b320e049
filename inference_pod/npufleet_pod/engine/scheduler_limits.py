"""What bounds the scheduler, and whom it prefers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_api.model import Preemption, SchedulingPolicy
from npufleet_pod.engine.memory.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that every step keeps."""

    max_num_sequences: int
    max_num_batched_tokens: int
    max_queued_requests: int
    """Requests that may wait beyond those that the sequences take."""
    max_model_length: int
    kv_blocks: int
    kv_block_tokens: int
    kv_page_blocks: int = 1
    """Blocks of a page, which is what memory is taken by."""

    @property
    def layout(self) -> CacheLayout:
        """How KV memory is divided."""
        return CacheLayout(self.kv_block_tokens, self.kv_block_tokens * self.kv_page_blocks, self.kv_blocks // self.kv_page_blocks)

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens take."""
        return -(-tokens // self.kv_block_tokens)


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """Who goes first; see EngineSettings for what the choices mean."""

    chunked_prefill: bool = True
    preemption: Preemption = Preemption.AGGRESSIVE
    policy: SchedulingPolicy = SchedulingPolicy.LATENCY_OPTIMISED
    starvation_steps: int = 256
    steps_in_flight: int = 1
    continuous_memory: bool = True
    """Whether a request is placed where it can grow in adjacent memory."""
