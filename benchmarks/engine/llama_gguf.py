"""Writes a Llama model of safetensors as a GGUF file in bfloat16, without a tokenizer: token ids are all that llama.cpp is given here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(folder: Path, target: Path) -> None:
    """Write the model in `folder`. Raises ValueError for another architecture than plain Llama's."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"] or config.get("rope_scaling"):
        raise ValueError(f"{folder}: only Llama models without scaled rotation are written for llama.cpp")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            own = _name(name)
            if own.endswith(("attn_q.weight", "attn_k.weight")):
                tensor = _interleaved(tensor, heads if "attn_q" in own else kv_heads)
            if tensor.dim() == 1:
                writer.add_tensor(own, tensor.to(torch.float32).numpy())
            else:
                raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{NAMES[part]}.{kind}"


def _interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp pairs neighbouring elements of a head in its rotation, the checkpoint the two halves."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
