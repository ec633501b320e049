"""A tiny model of every served family and of the ways in which they differ: keyword arguments of `write_tiny_model`."""

from __future__ import annotations

from typing import Any

GLM: dict[str, Any] = {"architecture": "GlmForCausalLM", "config": {"head_dim": 16, "pad_token_id": 0}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "llama tied, one kv head": {"tied": True, "kv_heads": 1},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "config": {"head_dim": 16}},
    "qwen3 whose heads are wider than its hidden states": {"architecture": "Qwen3ForCausalLM", "config": {"head_dim": 24}},
    "qwen3 with the head size of its family": {"architecture": "Qwen3ForCausalLM", "heads": 2, "config": {"head_dim": 128}},
    "qwen3 with biases": {"architecture": "Qwen3ForCausalLM", "config": {"head_dim": 16, "attention_bias": True}},
    "qwen2 moe": {"architecture": "Qwen2MoeForCausalLM", "config": {"norm_topk_prob": False}},
    "qwen2 moe normalised, without biases": {"architecture": "Qwen2MoeForCausalLM", "config": {"qkv_bias": False}},
    "qwen2 moe in every second layer": {"architecture": "Qwen2MoeForCausalLM", "layers": 4, "config": {"decoder_sparse_step": 2}},
    "qwen3 moe": {"architecture": "Qwen3MoeForCausalLM", "config": {"head_dim": 16}},
    "qwen3 moe with a plain layer": {"architecture": "Qwen3MoeForCausalLM", "config": {"head_dim": 16, "mlp_only_layers": [0]}},
    "glm": GLM,
    "linear": {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "yarn": {"config": {"rope_scaling": YARN}},
    "yarn of deepseek": {"config": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16, "beta_slow": 2}}},
    "yarn with all said": {"config": {"rope_scaling": {**YARN, "attention_factor": 1.3, "truncate": False}}},
    "yarn from the lengths": {
        "config": {"rope_scaling": {"rope_type": "yarn", "factor": 2048 / 32, "original_max_position_embeddings": 32}}
    },
    "yarn over part of a head": {**GLM, "config": {**GLM["config"], "rope_scaling": YARN}},
    "llama3": {"config": {"rope_scaling": LLAMA3}},
    "dynamic within its window": {"config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}},
}
