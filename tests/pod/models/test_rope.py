from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from npufleet_pod.models.config import parse_config
from npufleet_pod.models.rope import RotaryEmbedding
from npufleet_pod.models.rope_scaling import PairScaling

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def rotary(scaling: dict[str, Any] | None = None) -> RotaryEmbedding:
    return RotaryEmbedding(parse_config({**CONFIG, "rope_scaling": scaling}), CPU)


def test_divisors_of_a_gguf_file_are_another_way_to_say_llama3() -> None:
    plain, scaled = rotary().frequencies, rotary(LLAMA3).frequencies
    factors = PairScaling(tuple((plain / scaled).tolist()))
    same = RotaryEmbedding(replace(parse_config(CONFIG), rope_scaling=factors), CPU)
    torch.testing.assert_close(same.frequencies, scaled)
    assert not torch.allclose(plain, scaled)


def test_linear_scaling_turns_as_if_positions_lay_closer() -> None:
    positions = torch.arange(0, 400, 4)
    scaled = rotary({"type": "linear", "factor": 4.0}).rotation(positions, torch.float32)
    plain = rotary().rotation(positions // 4, torch.float32)
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [None, torch.full((64,), 64)])
def test_dynamic_scaling_changes_nothing_within_the_window(lengths: torch.Tensor | None) -> None:
    positions = torch.arange(64)
    dynamic = rotary({"type": "dynamic", "factor": 4.0}).rotation(positions, torch.float32, lengths)
    for one, other in zip(dynamic, rotary().rotation(positions, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dynamic_scaling_turns_each_token_by_the_length_it_is_given_whoever_is_beside_it() -> None:
    embedding = rotary({"type": "dynamic", "factor": 4.0})
    positions, lengths = torch.tensor([5, 70, 70, 199]), torch.tensor([200, 200, 71, 200])
    together = embedding.rotation(positions, torch.float32, lengths)
    for row in range(4):
        alone = embedding.rotation(positions[row : row + 1], torch.float32, lengths[row : row + 1])
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[row : row + 1], other)
    assert not torch.allclose(together[0][1], together[0][2])
