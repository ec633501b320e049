"""Writes a tiny model again as a GGUF file, as llama.cpp's converter would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
NAMES |= {"Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe"}


def write_gguf(source: Path, folder: Path, quantisation: str = "F32", **metadata: Any) -> Path:
    """Write config and weights of the safetensors model in `source` as one GGUF file into `folder`; returns `folder`.

    quantisation: of the matrices; vectors and routers stay F32, as llama.cpp leaves them. metadata: further keys behind `<architecture>.`.
    """
    folder.mkdir(parents=True)
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    fields = json.loads((source / "config.json").read_text())
    name = NAMES[fields["architectures"][0]]
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    _write_metadata(writer, fields)
    for key, value in metadata.items():
        full = f"{name}.{key.replace('__', '.')}"
        writer.add_string(full, value) if isinstance(value, str) else writer.add_float32(full, value)
    names = gguf.get_tensor_name_map(arch, fields["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[quantisation]
    for tensor, values in _merged(load_file(source / "model.safetensors"), fields).items():
        own = names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert own is not None, tensor
        if name == "llama":
            values = _interleave_rows(tensor, values, fields)
        if values.ndim < 2 or "_inp" in own:
            writer.add_tensor(own, values)
        else:
            writer.add_tensor(own, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def _write_metadata(writer: Any, fields: dict[str, Any]) -> None:
    heads = fields["num_attention_heads"]
    size = fields.get("head_dim") or fields["hidden_size"] // heads
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(fields["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    tokens = [f"token{i}" for i in range(fields["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    if "num_experts" in fields:
        writer.add_expert_count(fields["num_experts"])
        writer.add_expert_used_count(fields["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(fields["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(fields["shared_expert_intermediate_size"])


def _merged(weights: dict[str, np.ndarray], fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """llama.cpp keeps a layer's experts in one tensor, and a gate of one row as a vector."""
    merged = {name: values for name, values in weights.items() if ".experts." not in name}
    for index in range(fields["num_hidden_layers"] if "num_experts" in fields else 0):
        prefix = f"model.layers.{index}.mlp.experts"
        for part in ("gate_proj", "up_proj", "down_proj"):
            everyone = [weights[f"{prefix}.{expert}.{part}.weight"] for expert in range(fields["num_experts"])]
            merged[f"{prefix}.{part}.weight"] = np.stack(everyone)
    return {name: values[0] if name.endswith("shared_expert_gate.weight") else values for name, values in merged.items()}


def _interleave_rows(name: str, values: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
