"""What is measured, alike in every engine, and what the machine allows at best. Imports nothing but the standard library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROMPT_TOKENS = NEW_TOKENS = 128
PREFILL_TOKENS = 1024
BATCHES = (1, 8, 32, 64)


def prompt(index: int, tokens: int, round_: int = 0) -> list[int]:
    """Ids that differ from sequence to sequence, below 40,100: no cache of prompts helps anyone."""
    return [(index * 7919 + position * 104729 + round_ * 31) % 40000 + 100 for position in range(tokens)]


def rates(seconds: Callable[[int, int, int, int], float], repeats: int) -> dict[str, float]:
    """Tokens a second of every point. seconds: of so many prompts of so many tokens, with so many new ones each, in a round of its own."""
    found = {}
    for batch in BATCHES:
        times = [seconds(batch, PROMPT_TOKENS, NEW_TOKENS, round_) for round_ in range(1 if batch > 8 else repeats)]
        found[f"b{batch}_tok_s"] = round(batch * NEW_TOKENS / min(times), 1)
    found["prefill_1024_tok_s"] = round(PREFILL_TOKENS / min(seconds(1, PREFILL_TOKENS, 1, round_) for round_ in range(repeats + 1)), 1)
    return found


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers that a step of a dense decoder is bounded by."""

    parameters: int
    """Of all layers and of the head: what each step reads. A head that is the embedding's table counts once."""
    head_parameters: int
    layers: int
    heads: int
    head_size: int

    def weight_bytes(self, bits: int) -> float:
        """Weights that a step reads, in a type of so many bits."""
        return self.parameters * bits / 8

    def flops(self, tokens: int, length: int, scored: int) -> float:
        """Of a step with `tokens` new tokens that see `length` tokens on average, `scored` of which are scored by the head."""
        products = 2.0 * (self.parameters - self.head_parameters) * tokens + 2.0 * self.head_parameters * scored
        return products + 4.0 * self.layers * self.heads * self.head_size * length * tokens


def model_size(folder: Path) -> ModelSize:
    """Read from config.json and the headers of the safetensors files."""
    config = json.loads((folder / "config.json").read_text())
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes.update({name: entry["shape"] for name, entry in header.items() if name != "__metadata__"})
    total = sum(_numel(shape) for shape in shapes.values())
    embedding = config["vocab_size"] * config["hidden_size"]
    tied = config.get("tie_word_embeddings", False) and "lm_head.weight" not in shapes
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return ModelSize(total if tied else total - embedding, embedding, config["num_hidden_layers"], heads, size)


def _numel(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def shares(measured: Mapping[str, float], size: ModelSize, bits: int, read_bytes_s: float, flop_s: float) -> dict[str, float]:
    """Of each point, the least time that reading the weights once a step and computing its products could take, over the time it took.

    KV, activations and everything between steps are left out of the bound, so 1 is never reached.
    """
    found = {}
    for batch in BATCHES:
        rate = measured.get(f"b{batch}_tok_s")
        if not rate:
            continue
        prefill = size.flops(batch * PROMPT_TOKENS, PROMPT_TOKENS // 2, batch) / flop_s
        step = max(size.weight_bytes(bits) / read_bytes_s, size.flops(batch, PROMPT_TOKENS + NEW_TOKENS // 2, batch) / flop_s)
        found[f"b{batch}_tok_s"] = round((prefill + (NEW_TOKENS - 1) * step) * rate / (batch * NEW_TOKENS), 3)
    if rate := measured.get("prefill_1024_tok_s"):
        least = max(size.weight_bytes(bits) / read_bytes_s, size.flops(PREFILL_TOKENS, PREFILL_TOKENS // 2, 1) / flop_s)
        found["prefill_1024_tok_s"] = round(least * rate / PREFILL_TOKENS, 3)
    return found
