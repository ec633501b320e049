"""Writes a tiny GLM model in the layout of ChatGLM3's own checkpoints.

transformers ships no ChatGLM; its GlmForCausalLM computes the same function from the hub's layout (its conversion script, from which the
names below are, turns one into the other). So tokens of a model in this layout must equal those of its twin.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

TOP = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
}
LAYER = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def write_chatglm(twin: Path, folder: Path, **fields: Any) -> Path:
    """Write the GLM model in `twin` as ChatGLM3 would be, into `folder`; `fields` overrides its config.json. Returns `folder`."""
    folder.mkdir(parents=True)
    hub = json.loads((twin / "config.json").read_text())
    config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "ffn_hidden_size": hub["intermediate_size"],
        "fp32_residual_connection": False,
        "hidden_size": hub["hidden_size"],
        "kv_channels": hub["head_dim"],
        "layernorm_epsilon": hub["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": hub["num_key_value_heads"],
        "num_attention_heads": hub["num_attention_heads"],
        "num_layers": hub["num_hidden_layers"],
        "original_rope": True,
        "padded_vocab_size": hub["vocab_size"],
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": hub["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "pad_token_id": 0,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(twin / name, folder / name)
    weights = load_file(twin / "model.safetensors")
    own: dict[str, np.ndarray] = {f"{TOP[name]}.weight": weights[f"{name}.weight"] for name in TOP}
    for index in range(hub["num_hidden_layers"]):
        source, target = f"model.layers.{index}", f"transformer.encoder.layers.{index}"
        own.update({f"{target}.{LAYER[name]}.weight": weights[f"{source}.{name}.weight"] for name in LAYER})
        for kind in ("weight", "bias"):
            parts = [weights[f"{source}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            own[f"{target}.self_attention.query_key_value.{kind}"] = np.concatenate(parts)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
