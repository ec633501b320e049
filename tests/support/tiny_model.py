"""Writes a tiny random model of the Llama family with a real byte-level tokenizer: `python tests/support/tiny_model.py OUT_DIR`."""

from __future__ import annotations

import argparse
import json
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

    `config` overrides fields of config.json; weights follow its attention_bias and mlp_bias.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    intermediate = 2 * hidden_size
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen2" if architecture == "Qwen2ForCausalLM" else "llama",
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
    hidden, inner, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    size = fields.get("head_dim") or hidden // fields["num_attention_heads"]
    query, keys = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    qwen = fields["architectures"] == ["Qwen2ForCausalLM"]
    attention_bias, mlp_bias = fields.get("attention_bias", False), fields.get("mlp_bias", False)
    weights: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        weights[name] = (random.standard_normal(shape) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)).astype(np.float32)

    def project(name: str, rows: int, columns: int, bias: bool) -> None:
        add(f"{name}.weight", rows, columns)
        if bias:
            add(f"{name}.bias", rows)

    add("model.embed_tokens.weight", vocab, hidden)
    for index in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        project(f"{prefix}.self_attn.q_proj", query, hidden, attention_bias or qwen)
        project(f"{prefix}.self_attn.k_proj", keys, hidden, attention_bias or qwen)
        project(f"{prefix}.self_attn.v_proj", keys, hidden, attention_bias or qwen)
        project(f"{prefix}.self_attn.o_proj", hidden, query, attention_bias and not qwen)
        project(f"{prefix}.mlp.gate_proj", inner, hidden, mlp_bias)
        project(f"{prefix}.mlp.up_proj", inner, hidden, mlp_bias)
        project(f"{prefix}.mlp.down_proj", hidden, inner, mlp_bias)
        add(f"{prefix}.input_layernorm.weight", hidden)
        add(f"{prefix}.post_attention_layernorm.weight", hidden)
    add("model.norm.weight", hidden)
    if not fields["tie_word_embeddings"]:
        add("lm_head.weight", vocab, hidden)
    return weights


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
    arguments = parser.parse_args()
    print(write_tiny_model(arguments.out_dir, seed=arguments.seed))


if __name__ == "__main__":
    main()
