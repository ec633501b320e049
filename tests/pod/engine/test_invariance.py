"""A request's tokens are its own: whatever it was computed with, in whatever parts, and wherever its KV came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npufleet_pod.engine.request import GenerationRequest, SamplingParams
from support.greedy import transformers_greedy
from support.local_engine import Recorder, generate, local_engine, request
from support.prompts import COUNT, PROMPTS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "depth 1": {"pipeline_depth": 1},
    "depth 2": {"pipeline_depth": 2},
    "depth 3": {"pipeline_depth": 3},
    "depth 4": {"pipeline_depth": 4},
    "not asynchronous": {"asynchronous_execution": False, "pipeline_depth": 4},
    "one sequence at a time": {"max_num_sequences": 1},
    "three sequences, aggressive": {"max_num_sequences": 3, "starvation_steps": 5},
    "three sequences, conservative": {"max_num_sequences": 3, "preemption": "Conservative"},
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 17, prompts first": {"max_num_batched_tokens": 17, "scheduling_policy": "ThroughputOptimised"},
    "whole prompts": {"chunked_prefill": False, "max_num_batched_tokens": 140},
    "prompts longer than a step": {"chunked_prefill": False, "max_num_batched_tokens": 64},
    "blocks of 16": {"block_size": 16},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "no prefix cache": {"prefix_cache": False},
    "scattered memory": {"continuous_memory": False, "block_size": 16},
    "little memory": {"kv_blocks": 14, "block_size": 16},
    "little memory, deep, no prefix cache": {"kv_blocks": 14, "block_size": 16, "pipeline_depth": 4, "prefix_cache": False},
    "little memory, conservative": {"kv_blocks": 14, "block_size": 16, "preemption": "Conservative"},
    "little memory, small steps": {"kv_blocks": 14, "block_size": 16, "max_num_batched_tokens": 20, "starvation_steps": 3},
    "fusion level 1": {"fusion_level": 1},
    "fusion level 3, scattered, in chunks": {"fusion_level": 3, "continuous_memory": False, "block_size": 16, "max_num_batched_tokens": 33},
    "chat": {"profile": "HighConcurrencyChat"},
    "documents": {"profile": "BatchDocumentProcessing"},
}
REPEATED = {"little memory": "memory runs out", "little memory, deep, no prefix cache": "memory runs out"}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What transformers answers, one prompt at a time."""
    answers = transformers_greedy(tiny_model, PROMPTS, COUNT)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS), "answers that are all the same prove nothing"
    return answers


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_greedy_tokens_equal_transformers(name: str, tiny_model: Path, expected: list[list[int]]) -> None:
    recorder = Recorder()
    async with local_engine(tiny_model, recorder, **CONFIGURATIONS[name]) as engine:
        for turn in range(2):
            requests = [request(f"{turn}.{index}", prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
            assert await generate(engine, *requests) == expected
    if name in REPEATED:
        assert recorder.preempted > 0, f"{REPEATED[name]}, and yet nobody had to wait"


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("tiers", [{"host_cache_mi": 1}, {"host_cache_mi": 1, "disk_cache_mi": 1}], ids=["host", "host and disk"])
async def test_greedy_tokens_survive_traffic_between_the_tiers(
    tiers: dict[str, int], depth: int, tiny_model: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    # A block of 16 tokens takes 8 KiB here: the device holds 20, the host 128.
    recorder = Recorder()
    many: dict[str, Any] = {"kv_blocks": 20, "block_size": 16, "pipeline_depth": depth, "disk_cache_path": str(tmp_path / "kv")}
    async with local_engine(tiny_model, recorder, **many, **tiers) as engine:
        for turn in range(3):
            fillers = [request(f"filler {turn}.{index}", [index + 3] * 200, 2) for index in range(14)]
            requests = [request(f"{turn}.{index}", prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
            assert (await generate(engine, *requests, *fillers))[: len(PROMPTS)] == expected
        moved = engine.residency()
    assert moved.stored > 0
    assert moved.loaded > 0
    assert (moved.spilled > 0) == ("disk_cache_mi" in tiers)
    assert not list((tmp_path / "kv").glob("*")) or "disk_cache_mi" in tiers


@pytest.mark.parametrize("name", ["depth 4", "little memory", "chunks of 16", "three sequences, aggressive"])
async def test_seeded_samples_are_the_same_too(name: str, tiny_model: Path) -> None:
    def requests() -> list[GenerationRequest]:
        return [
            request(str(index), prompt, COUNT, SamplingParams(temperature=1.2, top_p=0.9, seed=index, frequency_penalty=0.5))
            for index, prompt in enumerate(PROMPTS)
        ]

    async with local_engine(tiny_model, pipeline_depth=1, max_num_sequences=1, prefix_cache=False) as engine:
        alone = [(await generate(engine, one))[0] for one in requests()]
    async with local_engine(tiny_model, **CONFIGURATIONS[name]) as engine:
        assert await generate(engine, *requests()) == alone
        assert await generate(engine, *requests()) == alone
