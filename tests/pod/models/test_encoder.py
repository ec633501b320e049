"""Hidden states of encoders equal transformers' in float32 on the same random weights, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.errors import ContextLengthError, ModelError
from npufleet_pod.models.checkpoint import Checkpoint
from npufleet_pod.models.encoder import Encoder, load_encoder
from npufleet_pod.models.encoder_config import load_encoder_config, parse_encoder_config

PROMPTS = [[5], [10, 20, 30], list(range(3, 60)), [7, 7, 7, 7, 200]]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 260}
CONFIG = {"architectures": ["BertModel"], **SIZES, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForMaskedLM": {"hidden_act": "gelu_new"},
    "BertForSequenceClassification": {"layer_norm_eps": 1e-3},
    "RobertaModel": {"pad_token_id": 1, "type_vocab_size": 1},
    "RobertaForMaskedLM": {"pad_token_id": 1},
    "XLMRobertaModel": {"pad_token_id": 1, "hidden_act": "gelu_pytorch_tanh"},
}


def write_encoder(folder: Path, name: str, **fields: Any) -> Any:
    """A random model of transformers, written to `folder`."""
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, max_position_embeddings=64, **fields)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.dim() > 1 else 0.5))
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> Encoder:
    config = load_encoder_config(folder)
    with Checkpoint(folder, torch.float32, torch.device("cpu")) as checkpoint:
        return load_encoder(config, checkpoint, select_kernels("cpu"))


@torch.inference_mode()
def encode(encoder: Encoder, prompts: list[list[int]], token_types: list[int] | None = None) -> list[torch.Tensor]:
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = encoder.forward(ids, lengths, None if token_types is None else torch.tensor(token_types))
    return list(torch.split(hidden, lengths))


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_equal_transformers(name: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name, **MODELS[name])
    encoder = load(tmp_path)
    together = encode(encoder, PROMPTS)
    with torch.inference_mode():
        for prompt, states in zip(PROMPTS, together, strict=True):
            expected = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(encode(encoder, [prompt])[0], expected, rtol=1e-4, atol=1e-4)


def test_token_types_tell_the_second_text_from_the_first(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "BertModel")
    types = [0, 0, 1, 1, 1]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[3]]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
    torch.testing.assert_close(encode(load(tmp_path), [PROMPTS[3]], types)[0], expected, rtol=1e-4, atol=1e-4)


def test_norms_of_the_first_berts_are_found_under_their_old_names(tmp_path: Path) -> None:
    write_encoder(tmp_path, "BertForMaskedLM")
    expected = encode(load(tmp_path), PROMPTS)
    path = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(old, path)
    for states, same in zip(encode(load(tmp_path), PROMPTS), expected, strict=True):
        assert torch.equal(states, same)


def test_a_text_beyond_the_position_table_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path, "RobertaModel", pad_token_id=1)
    encoder = load(tmp_path)
    encode(encoder, [[5] * 62])
    with pytest.raises(ContextLengthError, match="63 tokens are more than the model's 62: shorten the text"):
        encode(encoder, [[5], [5] * 63])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no encoder that is known: use a model of BertForMaskedLM"),
        ({"architectures": None}, "architectures: None is no encoder"),
        ({"hidden_act": "relu"}, "hidden_act: Input should be 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: Input should be 'absolute'"),
        ({"is_decoder": True}, "is_decoder: Input should be False"),
        ({"num_attention_heads": 5}, "num_attention_heads: 5 heads do not split hidden_size 64"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 63}, "pad_token_id: 63 leaves no position of 64"),
        ({"hidden_size": None}, "hidden_size: Input should be a valid integer"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        parse_encoder_config({**CONFIG, **change})
