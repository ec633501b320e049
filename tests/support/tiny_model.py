"""Writes a tiny random model of the Llama family with a real byte-level tokenizer: `python tests/support/tiny_model.py OUT_DIR`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [
    ("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("r", "e"), ("o", "n"), ("an", "d"), ("o", "u"), ("in", "g"),
    ("l", "l"), ("h", "e"), ("he", "ll"), ("hell", "o"), ("w", "or"), ("o", "r"), ("Ġ", "the"), ("Ġ", "a"), ("e", "s"), ("s", "t"),
]  # fmt: skip
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GlmForCausalLM": "glm",
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer: 256 bytes, a few merges, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = SPECIAL_TOKENS + alphabet
    merges = []
    for left, right in MERGES:
        if left in pieces and right in pieces:
            merges.append((left, right))
            pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
    architecture: str = "LlamaForCausalLM",
    tied: bool = False,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write config, weights (float32, random from `seed`), tokenizer and chat template into `folder`; returns it.

    `config` overrides fields of config.json; weights follow its attention_bias and mlp_bias, and the fields of experts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    intermediate = 2 * hidden_size
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **(EXPERTS if "Moe" in architecture else {}),
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))
    _write_weights(folder, _weights(fields, np.random.default_rng(seed)), shards)
    for path in folder.iterdir():
        path.chmod(0o644)  # pods read it as a user of their own
    return folder


def _weights(fields: dict[str, Any], random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, vocab = fields["hidden_size"], fields["vocab_size"]
    weights: dict[str, np.ndarray] = {}

    def project(name: str, rows: int, columns: int, bias: bool = False) -> None:
        weights[f"{name}.weight"] = (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        if bias:
            vector(f"{name}.bias", rows)

    def vector(name: str, size: int) -> None:
        weights[name] = (random.standard_normal(size) * 0.5).astype(np.float32)

    project("model.embed_tokens", vocab, hidden)
    for index in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        _attention_weights(fields, f"{prefix}.self_attn", project, vector)
        _mlp_weights(fields, index, f"{prefix}.mlp", project)
        vector(f"{prefix}.input_layernorm.weight", hidden)
        vector(f"{prefix}.post_attention_layernorm.weight", hidden)
    vector("model.norm.weight", hidden)
    if not fields["tie_word_embeddings"]:
        project("lm_head", vocab, hidden)
    return weights


def _attention_weights(fields: dict[str, Any], prefix: str, project: Callable[..., None], vector: Callable[[str, int], None]) -> None:
    (architecture,) = fields["architectures"]
    hidden = fields["hidden_size"]
    size = fields.get("head_dim") or hidden // fields["num_attention_heads"]
    query, keys = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    bias = fields.get("attention_bias", architecture == "GlmForCausalLM")
    if architecture in ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM"):
        bias = fields.get("qkv_bias", True)
    for name, rows in (("q_proj", query), ("k_proj", keys), ("v_proj", keys)):
        project(f"{prefix}.{name}", rows, hidden, bias)
    project(f"{prefix}.o_proj", hidden, query, fields.get("attention_bias", False) and architecture.startswith(("Llama", "Qwen3")))
    if architecture.startswith("Qwen3"):
        vector(f"{prefix}.q_norm.weight", size)
        vector(f"{prefix}.k_norm.weight", size)


def _mlp_weights(fields: dict[str, Any], index: int, prefix: str, project: Callable[..., None]) -> None:
    (architecture,) = fields["architectures"]
    hidden = fields["hidden_size"]

    def gated(name: str, inner: int, bias: bool = False) -> None:
        project(f"{name}.gate_proj", inner, hidden, bias)
        project(f"{name}.up_proj", inner, hidden, bias)
        project(f"{name}.down_proj", hidden, inner, bias)

    if "Moe" in architecture and index not in fields["mlp_only_layers"] and (index + 1) % fields["decoder_sparse_step"] == 0:
        project(f"{prefix}.gate", fields["num_experts"], hidden)
        for expert in range(fields["num_experts"]):
            gated(f"{prefix}.experts.{expert}", fields["moe_intermediate_size"])
        if architecture == "Qwen2MoeForCausalLM":
            gated(f"{prefix}.shared_expert", fields["shared_expert_intermediate_size"])
            project(f"{prefix}.shared_expert_gate", 1, hidden)
    elif architecture == "GlmForCausalLM":
        project(f"{prefix}.gate_up_proj", 2 * fields["intermediate_size"], hidden)
        project(f"{prefix}.down_proj", hidden, fields["intermediate_size"])
    else:
        gated(prefix, fields["intermediate_size"], fields.get("mlp_bias", False))


def _write_weights(folder: Path, weights: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of config.json, as a JSON object; weights follow it")
    arguments = parser.parse_args()
    print(write_tiny_model(arguments.out_dir, seed=arguments.seed, config=arguments.config))


if __name__ == "__main__":
    main()
