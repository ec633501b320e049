"""Greedy tokens equal transformers' on the same weights, whatever batch and chunks they were computed in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npufleet_pod.tokenizer import load_tokenizer
from support.greedy import transformers_greedy
from support.local_engine import generate, local_engine, request
from support.tiny_model import write_tiny_model

PROMPTS = [[5], [10, 20, 30], list(range(3, 90)), [7, 7, 7, 7, 7, 7, 7, 200], list(range(250, 3, -1)), [270, 1, 90]]
COUNT = 12
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied": {"tied": True},
    "one kv head": {"kv_heads": 1},
    "multi-head": {"kv_heads": 4},
    "biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "head size of its own": {"config": {"head_dim": 24}},
    "llama3 rope": {"config": {"rope_scaling": LLAMA3}},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "sharded": {"shards": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, **VARIANTS[variant])
    expected = transformers_greedy(model, PROMPTS, COUNT)
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"
    requests = [request(str(i), prompt, COUNT) for i, prompt in enumerate(PROMPTS)]
    async with local_engine(model) as engine:
        assert await generate(engine, *requests) == expected
        assert [(await generate(engine, one))[0] for one in requests] == expected


@pytest.mark.parametrize(
    "bounds",
    [
        {"max_num_sequences": 1},
        {"max_num_sequences": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 33, "kv_blocks": 10},
    ],
    ids=str,
)
async def test_tokens_do_not_depend_on_batch_chunks_or_preemption(bounds: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3)
    requests = [request(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)]
    async with local_engine(model) as engine:
        alone = [(await generate(engine, one))[0] for one in requests]
    async with local_engine(model, **bounds) as engine:
        assert await generate(engine, *requests) == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_greedy_tokens_equal_transformers_on_real_weights(tmp_path: Path) -> None:
    tool = Path(__file__).parents[3] / "tools" / "smollm2.py"
    model = tmp_path / "smollm2"
    subprocess.run([sys.executable, str(tool), str(model)], check=True)  # noqa: ASYNC221 - nothing else runs on this loop
    tokenizer = load_tokenizer(model)
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village by the sea, there lived"]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    expected = transformers_greedy(model, prompts, 24)
    assert "Paris" in tokenizer.decode(expected[0], True)
    async with local_engine(model) as engine:
        for size in (1, 3):
            requests = [request(str(i), prompts[i], 24) for i in range(size)]
            assert await generate(engine, *requests) == expected[:size]
