"""A prompt that is sent back before the answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from npufleet_pod.engine.request import TokenLogprobs
from npufleet_pod.server.logprobs import ScoredToken
from npufleet_pod.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text, and the character at which each of its tokens begins; empty where no scores are asked for."""

    text: str
    offsets: tuple[int, ...] = ()

    @classmethod
    def of_tokens(cls, token_ids: Sequence[int], tokenizer: TextTokenizer, skip_special_tokens: bool) -> Self:
        """The echo of a prompt that came as token ids."""
        characters, offset = codecs.getincrementaldecoder("utf-8")("replace"), 0
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            if not (skip_special_tokens and tokenizer.is_special(token_id)):
                offset += len(characters.decode(tokenizer.token_bytes(token_id) or b""))
        return cls(tokenizer.decode(token_ids, skip_special_tokens), tuple(offsets))

    def scored(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[ScoredToken]:
        """The prompt's tokens with their scores. Raises ValueError unless there is one of each."""
        return [ScoredToken(*one) for one in zip(self.offsets, token_ids, entries, strict=True)]
