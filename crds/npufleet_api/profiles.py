"""What the engine profiles stand for. Chat serves many short requests, documents few long ones; Balanced lies between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npufleet_api.model import BlockSize, EngineOverrides, EngineProfile, Preemption, SchedulingPolicy


@dataclass(frozen=True, slots=True)
class ProfileDefaults:
    """What a profile says where nothing else is said; fields are those of EngineSettings."""

    max_num_sequences: int
    max_num_batched_tokens: int
    block_size: BlockSize
    chunked_prefill: bool
    fusion_level: int
    pipeline_depth: int
    preemption: Preemption
    scheduling_policy: SchedulingPolicy
    continuous_memory: bool = True
    asynchronous_execution: bool = True


PROFILES: Mapping[EngineProfile, ProfileDefaults] = {
    EngineProfile.HIGH_CONCURRENCY_CHAT: ProfileDefaults(
        max_num_sequences=128,
        max_num_batched_tokens=8192,
        block_size=BlockSize.TOKENS_16,
        chunked_prefill=True,
        fusion_level=2,
        pipeline_depth=2,
        preemption=Preemption.AGGRESSIVE,
        scheduling_policy=SchedulingPolicy.LATENCY_OPTIMISED,
    ),
    EngineProfile.BATCH_DOCUMENT_PROCESSING: ProfileDefaults(
        max_num_sequences=32,
        max_num_batched_tokens=65536,
        block_size=BlockSize.TOKENS_64,
        chunked_prefill=False,
        fusion_level=3,
        pipeline_depth=4,
        preemption=Preemption.CONSERVATIVE,
        scheduling_policy=SchedulingPolicy.THROUGHPUT_OPTIMISED,
    ),
    EngineProfile.BALANCED: ProfileDefaults(
        max_num_sequences=64,
        max_num_batched_tokens=16384,
        block_size=BlockSize.TOKENS_32,
        chunked_prefill=True,
        fusion_level=2,
        pipeline_depth=3,
        preemption=Preemption.AGGRESSIVE,
        scheduling_policy=SchedulingPolicy.LATENCY_OPTIMISED,
    ),
}


def step_limits(engine: EngineOverrides) -> tuple[int, int]:
    """Most sequences and most tokens of a step: the model's own, else its profile's."""
    profile = PROFILES[engine.profile]
    return engine.max_num_sequences or profile.max_num_sequences, engine.max_num_batched_tokens or profile.max_num_batched_tokens
