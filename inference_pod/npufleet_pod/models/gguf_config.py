"""Turns the metadata of a GGUF file into the fields of a config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npufleet_pod.errors import ModelError, shorten

GGUF_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
FIELDS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
"""Fields of config.json and the keys of the metadata behind `<architecture>.`."""
END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_file(model_dir: Path) -> Path | None:
    """The GGUF file of `model_dir`; None: there is none. Raises ModelError where there are several, since no index says which to take."""
    files = sorted(model_dir.glob("*.gguf"))
    if len(files) > 1:
        raise ModelError(f"{files[0]}: one of {len(files)} GGUF files in {model_dir}: leave the one to serve, merged if it was split")
    return files[0] if files else None


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The configuration that the GGUF file `path` carries, in config.json's fields. Raises ModelError."""
    from npufleet_pod.models.gguf_file import GgufFile

    with GgufFile(path) as file:
        metadata = file.metadata
        name = metadata.get("general.architecture")
        architecture = GGUF_ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None or (name == "llama" and metadata.get("llama.expert_count")):
            served = ", ".join(GGUF_ARCHITECTURES)
            raise ModelError(f"{path}: general.architecture: {shorten(name)} is not served: use a model of {served}")
        fields: dict[str, Any] = {"architectures": [architecture], "dtype": "float16"}
        fields.update({field: metadata[f"{name}.{key}"] for field, key in FIELDS.items() if f"{name}.{key}" in metadata})
        embedding = file.tensors.get("token_embd.weight")
        if embedding is not None:
            fields["vocab_size"] = embedding.shape[0]
        fields["tie_word_embeddings"] = "output.weight" not in file.tensors
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        ends = [metadata[key] for key in END_TOKENS if key in metadata]
        fields["eos_token_id"] = ends or None
        if architecture == "Qwen3MoeForCausalLM":
            # llama.cpp normalises for this family whatever the file says, and its converter leaves the key out.
            fields["norm_topk_prob"] = True
        if architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
            fields.setdefault("intermediate_size", fields.get("moe_intermediate_size"))
        fields["rope_scaling"] = _rope_scaling(metadata, f"{name}.rope.scaling.")
        if ROPE_FACTORS in file.tensors:
            fields["rope_scaling"] = {"rope_type": "pairs", "pair_factors": file.read(ROPE_FACTORS).tolist()}
        return fields


def _rope_scaling(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{prefix}type")
    if kind in (None, "none"):
        return None
    factor = metadata.get(f"{prefix}factor")
    original = metadata.get(f"{prefix}original_context_length")
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
