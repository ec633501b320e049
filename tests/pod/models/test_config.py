from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from npufleet_api.model import Dtype
from npufleet_pod.errors import ModelError
from npufleet_pod.models.config import ExpertsConfig, load_config, parse_config
from npufleet_pod.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling

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
QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# As published with THUDM/chatglm3-6b.
CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "pad_token_id": 0,
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


def test_chatglm3_has_fields_of_its_own() -> None:
    config = parse_config(CHATGLM)
    assert (config.layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (28, 4096, 13696, 65024)
    assert (config.heads, config.kv_heads, config.head_size, config.rotary_size) == (32, 2, 128, 64)
    assert (config.max_positions, config.rope_theta, config.norm_epsilon) == (8192, 10000.0, 1e-5)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert config.checkpoint_dtype is Dtype.FLOAT16
    assert parse_config({**CHATGLM, "rope_ratio": 50, "seq_length": 32768}).rope_theta == 500000.0


def test_experts_are_in_the_layers_that_the_config_names() -> None:
    config = parse_config({**CONFIG, **QWEN_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.experts == ExpertsConfig(8, 2, 32, False, 48, frozenset({1, 5}))
    qwen3 = parse_config({**CONFIG, **QWEN_MOE, "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True})
    assert qwen3.experts == ExpertsConfig(8, 2, 32, True, None, frozenset({0, 1}))
    assert parse_config(CONFIG).experts is None


def test_what_config_json_leaves_out_is_what_its_family_assumes() -> None:
    assert parse_config({**CONFIG, "architectures": ["Qwen3ForCausalLM"]}).head_size == 128
    assert parse_config({**CONFIG, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}).head_size == 32
    glm = parse_config({**CONFIG, "architectures": ["GlmForCausalLM"], "head_dim": None})
    assert (glm.head_size, glm.rotary_size, glm.qkv_bias) == (128, 64, True)


@pytest.mark.parametrize(
    ("rope", "scaling", "positions"),
    [
        ({"type": "linear", "factor": 4}, LinearScaling(4.0), 8192),
        ({"rope_type": "dynamic", "factor": 2.5}, DynamicScaling(2.5, 2048), 5120),
        (
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024},
            YarnScaling(4.0, 1024, 0.1 * math.log(4) + 1, 32.0, 1.0, True),
            4096,
        ),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, YarnScaling(2.0, 1024, 0.1 * math.log(2) + 1, 32.0, 1.0, True), 2048),
        (LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 1024), 2048),
        ({"rope_type": "default"}, None, 2048),
    ],
    ids=str,
)
def test_scaling_says_how_long_a_sequence_may_be(rope: dict[str, Any], scaling: object, positions: int) -> None:
    config = parse_config({**CONFIG, "rope_scaling": rope})
    assert config.rope_scaling == scaling
    assert config.max_positions == positions
    assert config.rope_depends_on_length == isinstance(scaling, DynamicScaling)
    assert config.original_positions == (2048 if isinstance(scaling, DynamicScaling) else positions)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures: 'GPT2LMHeadModel' is not served: use a model of LlamaForCausalLM, Qwen2"),
        (
            {"architectures": ["BertModel"]},
            "architectures: 'BertModel' is an encoder, which writes no text: use a model of",
        ),
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
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            "rope_scaling: type 'longrope' is not served: use a model with linear, dyn",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: linear needs factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "rope_scaling.factor: Input should be greater than or equal to 1, got 0.5"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: yarn needs factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": 64}}, "beta_slow 64.0 is above beta_fast 32.0: correct one of them"),
        ({"partial_rotary_factor": 0.05}, "partial_rotary_factor: 0.05 of head size 16 is not an even number of elements"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types.1: Input should be 'full_attention', got 'sliding_attention'",
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "num_experts: field is missing"),
        ({**QWEN_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts: correct one of them"),
        ({**QWEN_MOE, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size: field is missing"),
        ({"architectures": ["ChatGLMModel"]}, "num_layers: field is missing: use the config.json of ChatGLM2, ChatGLM3 or GLM-4"),
        ({**CHATGLM, "add_bias_linear": True}, "add_bias_linear: Input should be False, got True"),
        ({**CHATGLM, "rmsnorm": False}, "rmsnorm: Input should be True, got False"),
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
