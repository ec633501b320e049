"""Fill in the middle: a prompt that asks for what stands between a beginning and an end. Only models trained for it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_pod.tokenizer import TextTokenizer

FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before the beginning, before the end, and before the middle: Qwen and CodeGemma, StarCoder, SantaCoder, DeepSeek, Code Llama."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The three tokens of a model's format."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, leading: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Token ids of the prompt; leading: what begins every text, such as the beginning-of-sequence token."""
        return [*leading, self.prefix, *prefix, self.suffix, *suffix, self.middle]


def infill_tokens(tokenizer: TextTokenizer) -> InfillTokens | None:
    """The model's format; None if its vocabulary has none."""
    for pieces in FORMATS:
        prefix, suffix, middle = (tokenizer.token_id(piece) for piece in pieces)
        if prefix is not None and suffix is not None and middle is not None:
            return InfillTokens(prefix, suffix, middle)
    return None
