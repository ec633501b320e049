"""Greedy tokens of every family equal transformers' in float32 on the same random weights, whatever batch and chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npufleet_pod.models.architectures import ARCHITECTURES, CHATGLM_ARCHITECTURES
from npufleet_pod.models.config import load_config
from support.families import GLM, MODELS
from support.greedy import transformers_greedy
from support.local_engine import generate, local_engine, request
from support.tiny_model import write_tiny_model
from support.tiny_model_chatglm import write_chatglm
from support.tiny_model_decoder import decoder_greedy, decoder_logits, load_tiny_decoder

PROMPTS = [[5], [10, 20, 30], list(range(3, 90)), [7, 7, 7, 7, 7, 200], list(range(250, 100, -1))]
COUNT = 8


def transformers_logits(model: Path, prompt: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([prompt])).logits[0]
    return logits


def test_every_family_is_compared() -> None:
    compared = {model.get("architecture", "LlamaForCausalLM") for model in MODELS.values()}
    assert compared | CHATGLM_ARCHITECTURES == set(ARCHITECTURES)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, **MODELS[name])
    expected = transformers_greedy(model, PROMPTS, COUNT)
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"
    decoder = load_tiny_decoder(model)
    for prompt in PROMPTS[1:3]:
        torch.testing.assert_close(decoder_logits(decoder, prompt), transformers_logits(model, prompt), rtol=1e-4, atol=1e-4)
    assert decoder_greedy(decoder, PROMPTS, COUNT) == expected
    assert decoder_greedy(decoder, PROMPTS, COUNT, chunk=7) == expected
    assert [decoder_greedy(decoder, [prompt], COUNT)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("architecture", sorted(CHATGLM_ARCHITECTURES))
def test_chatglm_in_its_own_layout_says_what_its_twin_says(architecture: str, tmp_path: Path) -> None:
    twin = write_tiny_model(tmp_path / "twin", seed=3, **GLM)
    model = write_chatglm(twin, tmp_path / "model", architectures=[architecture])
    assert decoder_greedy(load_tiny_decoder(model), PROMPTS, COUNT, chunk=50) == transformers_greedy(twin, PROMPTS, COUNT)


def test_chatglm_of_long_context_turns_by_its_ratio(tmp_path: Path) -> None:
    theta = {"rope_theta": 500000.0}
    twin = write_tiny_model(tmp_path / "twin", seed=3, **{**GLM, "config": {**GLM["config"], **theta}})
    model = write_chatglm(twin, tmp_path / "model", rope_ratio=50)
    assert load_config(model).rope_theta == theta["rope_theta"]
    assert decoder_greedy(load_tiny_decoder(model), PROMPTS, COUNT) == transformers_greedy(twin, PROMPTS, COUNT)


async def test_dynamic_scaling_beyond_the_window_equals_transformers_with_its_cache(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write_tiny_model(tmp_path / "model", seed=3, max_positions=32, config={"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    decoder = load_tiny_decoder(model)
    prompts = [list(range(3, 90)), list(range(40, 70)), [7, 8, 9]]
    expected = []
    for prompt in prompts:
        # A model of its own for each prompt: transformers keeps the frequencies of the longest sequence that it has seen.
        peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        generated = peer.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(generated[0, len(prompt) :].tolist())
    assert decoder_greedy(decoder, prompts, 12) == expected
    assert decoder_greedy(decoder, prompts, 12, chunk=16) == expected
    requests = [request(str(i), prompt, 12) for i, prompt in enumerate(prompts)]
    async with local_engine(model, max_num_batched_tokens=40) as engine:
        assert await generate(engine, *requests) == expected
