"""How OpenAI words log probabilities: one form for completions, one for chats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from npufleet_pod.engine.request import PlacedLogprobs, TokenLogprobs
from npufleet_pod.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, the character at which it begins, and its score; None for the first token of an echoed prompt."""

    text_offset: int
    token_id: int
    logprobs: TokenLogprobs | None


def scored_answer(placed: Iterable[PlacedLogprobs], shift: int = 0) -> list[ScoredToken]:
    """The tokens of an answer that `shift` characters precede."""
    return [ScoredToken(shift + one.text_offset, one.logprobs.token_id, one.logprobs) for one in placed]


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The `logprobs` of a completion's choice. The chosen token is always among its alternatives."""
    spell = _speller(tokenizer, "bytes:")
    alternatives: list[dict[str, float] | None] = []
    for one in tokens:
        if one.logprobs is None:
            alternatives.append(None)
            continue
        best: dict[str, float] = {}
        for token_id, logprob in (*one.logprobs.top, (one.token_id, one.logprobs.logprob)):
            best.setdefault(spell(token_id), logprob)
        alternatives.append(best)
    return {
        "text_offset": [one.text_offset for one in tokens],
        "token_logprobs": [None if one.logprobs is None else one.logprobs.logprob for one in tokens],
        "tokens": [spell(one.token_id) for one in tokens],
        "top_logprobs": alternatives,
    }


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: TextTokenizer) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""
    spell = _speller(tokenizer, "")

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token_id)
        return {"token": spell(token_id), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}

    content = []
    for one in tokens:
        if one.logprobs is not None:
            top = [describe(token_id, logprob) for token_id, logprob in one.logprobs.top]
            content.append({**describe(one.token_id, one.logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _speller(tokenizer: TextTokenizer, prefix: str) -> Callable[[int], str]:
    """Text of a token; bytes that are only a part of a character are written out after `prefix`, as OpenAI does."""

    def spell(token_id: int) -> str:
        spelled = tokenizer.token_bytes(token_id)
        if spelled is None:
            return f"token_id:{token_id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)

    return spell
