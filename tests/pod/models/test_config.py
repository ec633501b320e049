from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npufleet_api.model import Dtype
from npufleet_pod.errors import ModelError
from npufleet_pod.models.config import Llama3Scaling, load_config, parse_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_defaults_are_those_of_the_hub() -> None:
    config = parse_config({key: value for key, value in CONFIG.items() if key != "num_key_value_heads"})
    assert (config.kv_heads, config.head_size, config.rope_theta, config.tied_embeddings) == (4, 16, 10000.0, False)
    assert config.checkpoint_dtype is Dtype.BFLOAT16
    assert config.eos_token_ids == {2}
    assert config.kv_elements_per_token == 2 * 2 * 4 * 16


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}},
    ],
    ids=["transformers 4", "transformers 5", "old name"],
)
def test_rope_fields_are_found_where_each_generation_of_tools_writes_them(rope: dict[str, Any]) -> None:
    config = parse_config({**CONFIG, **rope})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 1024)


def test_qwen2_has_biases_that_its_config_does_not_name() -> None:
    config = parse_config({**CONFIG, "architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["BertModel"]}, "architectures: 'BertModel' is not served: use a model of LlamaForCausalLM or Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures: None names none"),
        ({"architectures": [7]}, "architectures: [7] names none"),
        ({"hidden_size": None}, "hidden_size: Input should be a valid integer, got None"),
        ({"hidden_size": -1}, "hidden_size: Input should be greater than or equal to 1, got -1"),
        ({"hidden_size": 62}, "4 heads do not split hidden_size 62: set head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"hidden_act": "gelu"}, "hidden_act: Input should be 'silu', got 'gelu'"),
        ({"torch_dtype": "int8"}, "dtype: 'int8' is not served: use a checkpoint in float32, bfloat16, float16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: 'awq' weights are not served"),
        ({"quantization_config": "x"}, "quantization_config: None weights are not served"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: type 'yarn' is not served"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope_scaling: llama3 needs factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
        ({"rope_theta": 0}, "rope_theta: Input should be greater than 0"),
        ({"use_sliding_window": True}, "use_sliding_window: Input should be False"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_a_remedy(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config({**CONFIG, **change})
    message = str(caught.value)
    assert said in message
    assert message.startswith("config.json: ")
    assert message.count("\n") == 0


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {name}: field is missing: use the config.json that belongs to the weights"):
        parse_config({key: value for key, value in CONFIG.items() if key != name})


def test_end_of_sequence_ids_come_from_the_generation_config_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_config(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_config(tmp_path).eos_token_ids == {5, 6}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": {}}))
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id"):
        load_config(tmp_path)


def test_folder_mistakes_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory: mount the model's volume there"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="the directory is empty: copy the model's files into the volume"):
        load_config(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", '{"a": 1}x', "[" * 100_000])
def test_what_is_not_a_json_object_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config.json: (not JSON|holds list)"):
        load_config(tmp_path)
