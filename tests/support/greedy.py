"""What transformers generates greedily, one prompt at a time: the oracle of the engine's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def transformers_greedy(folder: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The next `count` tokens of each prompt, float32, ends of sequence ignored; without a cache, so that ours is tested too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
