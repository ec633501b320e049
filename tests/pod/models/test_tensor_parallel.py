"""A model cut into ranks says what the whole one says, and each rank reads its part and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from npufleet_api.model import Dtype
from npufleet_pod.models import checkpoint as checkpoint_module
from npufleet_pod.models.checkpoint import Checkpoint, open_checkpoint
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.models.decoder import Decoder
from npufleet_pod.models.gguf_file import GgufFile
from npufleet_pod.models.precision import uniform_precision
from npufleet_pod.models.sharding import max_ranks, shard
from npufleet_pod.models.weights import load_weights
from support.families import GLM, MODELS
from support.greedy import transformers_greedy
from support.thread_ranks import on_ranks
from support.tiny_model import write_tiny_model
from support.tiny_model_chatglm import write_chatglm
from support.tiny_model_decoder import decoder_greedy, decoder_logits, load_tiny_decoder
from support.tiny_model_gguf import write_gguf

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPTS = [[5], list(range(3, 60)), [7, 7, 7, 7, 7, 200]]
COUNT = 6
SMOLLM2: dict[str, Any] = {"hidden_size": 72, "heads": 9, "kv_heads": 3}
"""Heads in SmolLM2's proportions: three groups of three."""


def greedy(decoder: Decoder) -> list[list[int]]:
    return decoder_greedy(decoder, PROMPTS, COUNT, chunk=40)


def check_ranks(model: Path, expected: list[list[int]]) -> None:
    config = load_config(model)
    assert len({tuple(tokens) for tokens in expected}) > 1, "a model that always says the same proves nothing"
    whole = decoder_logits(load_tiny_decoder(model), PROMPTS[1])
    for ranks in range(2, min(4, max_ranks(config)) + 1):
        assert on_ranks(model, ranks, greedy) == [expected] * ranks, f"{ranks} ranks"
        for logits in on_ranks(model, ranks, lambda decoder: decoder_logits(decoder, PROMPTS[1])):
            torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_every_family_equal_transformers_on_2_to_4_ranks(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, **MODELS[name])
    check_ranks(model, transformers_greedy(model, PROMPTS, COUNT))


def test_three_groups_of_three_heads_are_served_on_2_to_4_ranks(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, **SMOLLM2)
    check_ranks(model, transformers_greedy(model, PROMPTS, COUNT))


def test_a_fused_projection_whose_pairs_lie_side_by_side_is_cut_by_heads(tmp_path: Path) -> None:
    twin = write_tiny_model(tmp_path / "twin", seed=3, **GLM)
    check_ranks(write_chatglm(twin, tmp_path / "model"), transformers_greedy(twin, PROMPTS, COUNT))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2 moe", "qwen3 moe"])
def test_a_gguf_file_is_cut_as_its_safetensors_are(name: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", seed=3, **MODELS[name])
    check_ranks(write_gguf(source, tmp_path / "gguf"), transformers_greedy(source, PROMPTS, COUNT))


@pytest.mark.parametrize("quantisation", ["F16", "Q8_0", "Q4_0"])
def test_ranks_of_a_quantised_file_say_what_it_says_whole(quantisation: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", seed=3)
    folder = write_gguf(source, tmp_path / "gguf", quantisation)
    check_ranks(folder, greedy(load_tiny_decoder(folder)))


class Counting:
    """A safetensors file that adds up what is asked of it."""

    def __init__(self, path: str, framework: str) -> None:
        self._file: Any = safe_open(path, framework=framework)

    def keys(self) -> list[str]:
        names: list[str] = self._file.keys()
        return names

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        elements[name] += tensor.numel()
        return tensor

    def get_slice(self, name: str) -> Any:
        piece = self._file.get_slice(name)

        class Piece:
            get_shape = piece.get_shape
            get_dtype = piece.get_dtype

            def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
                tensor: torch.Tensor = piece[part]
                elements[name] += tensor.numel()
                return tensor

        return Piece()


elements: Counter[str] = Counter()


def held(config: DecoderConfig, weights: object) -> int:
    """Elements of all tensors of a rank's weights, each counted once."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.numel()
        elif isinstance(value, tuple):
            for one in value:
                visit(one)
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                visit(getattr(value, field))

    visit(weights)
    return sum(seen.values())


@pytest.mark.parametrize("name", ["llama with biases", "llama tied, one kv head", "qwen2 moe", "glm", "chatglm"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_reads_what_it_holds_and_nothing_else(name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, **(GLM if name == "chatglm" else MODELS[name]))
    if name == "chatglm":
        model = write_chatglm(model, tmp_path / "chatglm")
    config = load_config(model)
    monkeypatch.setattr(checkpoint_module, "safe_open", Counting)
    total: Counter[str] = Counter()
    for rank in range(ranks):
        elements.clear()
        with Checkpoint(model, torch.float32, CPU) as checkpoint:
            weights = load_weights(config, checkpoint, lambda: True, shard(config, rank, ranks), uniform_precision(Dtype.FLOAT32, config))
        assert sum(elements.values()) == held(config, weights)
        total.update(elements)
    with safe_open(str(model / "model.safetensors"), framework="pt") as file:
        sizes = {key: math.prod(file.get_slice(key).get_shape()) for key in total}
    replicated = ("norm", "mlp.gate.weight", "shared_expert_gate")
    shared_kv = ("k_proj", "v_proj", "query_key_value") if ranks > config.kv_heads else ()
    for key, count in total.items():
        if any(part in key for part in replicated):
            assert count == ranks * sizes[key], key
        elif any(part in key for part in shared_kv):
            assert sizes[key] <= count <= ranks * sizes[key], key
        else:
            assert count == sizes[key], key


def test_a_rank_reads_its_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    folder = write_gguf(write_tiny_model(tmp_path / "model", seed=3), tmp_path / "gguf", "Q8_0")
    with GgufFile(folder / "model.gguf") as file:
        whole = file.read("blk.0.ffn_down.weight")
        for part in ((slice(8, 24),), (slice(0, 64), slice(32, 96)), (slice(3, 9), slice(30, 70)), (slice(0, 64), slice(5, 6))):
            assert (file.read("blk.0.ffn_down.weight", None, part) == whole[part]).all()
        norm = file.read("blk.0.attn_norm.weight")
        assert (file.read("blk.0.attn_norm.weight", None, (slice(7, 20),)) == norm[7:20]).all()
    with open_checkpoint(folder, torch.float32, CPU) as checkpoint:
        heads = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", (64, 64), (slice(16, 48),))
        assert torch.equal(heads, checkpoint.tensor("model.layers.0.self_attn.q_proj.weight", (64, 64))[16:48])
