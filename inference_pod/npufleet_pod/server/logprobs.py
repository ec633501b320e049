"""How OpenAI words log probabilities: one form for completions, one for chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class Speller:
    """How tokens are named."""

    tokenizer: TextTokenizer
    as_ids: bool = False
    """token_id:N instead of text."""

    def spell(self, token_id: int, prefix: str) -> str:
        """Text of a token; bytes that are only a part of a character are written out after `prefix`, as OpenAI does."""
        spelled = None if self.as_ids else self.tokenizer.token_bytes(token_id)
        if spelled is None:
            return f"token_id:{token_id}"
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in spelled)


def completion_logprobs(tokens: Sequence[ScoredToken], speller: Speller) -> dict[str, Any]:
    """The `logprobs` of a completion's choice. The chosen token is always among its alternatives."""

    def spell(token_id: int) -> str:
        return speller.spell(token_id, "bytes:")

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


def chat_logprobs(tokens: Sequence[ScoredToken], speller: Speller) -> dict[str, Any]:
    """The `logprobs` of a chat's choice."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = speller.tokenizer.token_bytes(token_id)
        return {"token": speller.spell(token_id, ""), "logprob": logprob, "bytes": None if spelled is None else list(spelled)}

    content = []
    for one in tokens:
        if one.logprobs is not None:
            top = [describe(token_id, logprob) for token_id, logprob in one.logprobs.top]
            content.append({**describe(one.token_id, one.logprobs.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_scores(entries: Sequence[TokenLogprobs | None], top: int, speller: Speller) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt but the first, its own score and those of the `top` likeliest by token id.

    rank: 1 is the likeliest; None for a token beyond those told.
    """

    def describe(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": speller.spell(token_id, "")}

    told: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            told.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        likeliest = [(token_id, logprob) for token_id, logprob in entry.top[:top] if token_id != entry.token_id]
        scores = [(entry.token_id, entry.logprob), *likeliest]
        told.append({str(token_id): describe(token_id, logprob, ranks.get(token_id)) for token_id, logprob in scores})
    return told
