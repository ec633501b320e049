"""Chooses the next token of each sequence in a batch. Holds what the choice depends on besides the logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from npufleet_pod.engine.drawing import draw, uniforms
from npufleet_pod.engine.logit_edits import BadWords, Penalties, SeenTokens, add_biases, allow_only, forbid, penalise, penalties_of
from npufleet_pod.engine.logprobs import PromptScores, token_logprobs
from npufleet_pod.engine.pooling import PooledPrompt
from npufleet_pod.engine.request import GenerationRequest, SampledToken, SamplingParams, Thoughts
from npufleet_pod.errors import GrammarError

if TYPE_CHECKING:
    from npufleet_pod.engine.grammar import GrammarState


@dataclass(slots=True)
class _Sequence:
    params: SamplingParams
    seed: int
    min_tokens: int
    end_tokens: NDArray[np.int64]
    """Tokens that end the generation, which min_tokens forbids at first."""
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    penalties: Penalties | None
    seen: SeenTokens
    """Kept only where there are penalties."""
    logprobs: int | None
    prompt: PromptScores | None
    pooled: PooledPrompt | None = None
    grammar: GrammarState | None = None
    thoughts: Thoughts | None = None
    thinks: bool = False
    """Whether the grammar waits for the end of the thoughts; the answer cannot end before."""
    error: GrammarError | None = None
    allowed: NDArray[np.bool_] | None = None
    """(vocabulary,): what the request lets come; None: all."""
    bad_words: BadWords | None = None
    drawn: int = 0

    @property
    def constrained(self) -> bool:
        """Whether the grammar says what comes next."""
        return self.grammar is not None and not self.thinks and self.error is None and not self.grammar.ended


class Sampler:
    """Samples batches of the sequences it was given. A sequence's tokens depend on its own logits, parameters and seed only.

    Used by one thread.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request: GenerationRequest, seed: int, eos_token_ids: Collection[int]) -> None:
        """Take a sequence; `seed` is used unless the request brings its own."""
        params, stop = request.sampling, request.stop
        ends = stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids.union(eos_token_ids)
        penalties = penalties_of(params)
        bias = {token_id: value for token_id, value in params.logit_bias if token_id < self._vocabulary}
        top = request.prompt_logprobs
        self._sequences[request.request_id] = _Sequence(
            params=params,
            seed=seed if params.seed is None else params.seed,
            min_tokens=stop.min_tokens,
            end_tokens=np.array(sorted(token_id for token_id in ends if token_id < self._vocabulary), dtype=np.int64),
            bias=(np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)) if bias else None,
            penalties=penalties,
            seen=SeenTokens(request.prompt_token_ids if penalties is not None and penalties.repetition != 1 else ()),
            logprobs=request.logprobs,
            prompt=None if top is None else PromptScores(request.prompt_token_ids, top),
            pooled=None if request.pooling is None else PooledPrompt(request.pooling, len(request.prompt_token_ids)),
            grammar=None if request.grammar is None else request.grammar.start(),
            thoughts=request.thoughts,
            thinks=request.thoughts is not None and request.thoughts.begun,
            allowed=None if params.allowed_token_ids is None else _mask(params.allowed_token_ids, self._vocabulary),
            bad_words=BadWords(params.bad_words) if params.bad_words else None,
        )

    def remove(self, request_id: str) -> None:
        """Forget a sequence; an unknown one is no error."""
        self._sequences.pop(request_id, None)

    def observe_prompt(self, request_id: str, start: int, count: int, score: Callable[[int, int], Tensor]) -> None:
        """Score the prompt's tokens if the request asked for it.

        `count` positions from `start` were computed; score: makes logits (n, vocabulary) of a range of them, counted from 0.
        """
        scores = self._sequences[request_id].prompt
        if scores is not None:
            scores.observe(start, count, score)

    def observe_hidden(self, request_id: str, start: int, hidden: Tensor) -> None:
        """Pool the prompt's hidden states if the request asked for it. hidden: (n, hidden) of the positions from `start`."""
        pooled = self._sequences[request_id].pooled
        if pooled is not None:
            pooled.observe(start, hidden)

    def sample(self, request_ids: Sequence[str], logits: Tensor) -> dict[str, SampledToken]:
        """The next token of each sequence. logits: (N, vocabulary) float32, row i of `request_ids[i]`; they are changed."""
        if not request_ids:
            return {}
        sequences = [self._sequences[request_id] for request_id in request_ids]
        scored = [row for row, one in enumerate(sequences) if one.logprobs is not None]
        raw = logits[scored] if scored else None
        self._edit(sequences, logits)
        numbers = uniforms([one.seed for one in sequences], [one.drawn for one in sequences])
        tokens: list[int] = draw(logits, [one.params for one in sequences], numbers).tolist()
        entries = {}
        if raw is not None:
            tops = [sequences[row].logprobs or 0 for row in scored]
            entries = dict(zip(scored, token_logprobs(raw, [tokens[row] for row in scored], tops), strict=True))
        sampled = {}
        for row, (request_id, sequence, token_id) in enumerate(zip(request_ids, sequences, tokens, strict=True)):
            prompt = sequence.prompt.entries if sequence.prompt is not None and sequence.drawn == 0 else None
            ended = _advance(sequence, token_id)
            vector = sequence.pooled.vector() if sequence.pooled is not None and sequence.drawn == 0 else None
            sampled[request_id] = SampledToken(token_id, entries.get(row), prompt, ended, sequence.error, vector)
            sequence.drawn += 1
            if sequence.penalties is not None:
                sequence.seen.add(token_id)
            if sequence.bad_words is not None:
                sequence.bad_words.add(token_id)
        return sampled

    def _edit(self, sequences: Sequence[_Sequence], logits: Tensor) -> None:
        """Apply what changes which token is likeliest, in vLLM's order: bias, min_tokens, penalties, bad words; last, what may come."""
        rows = list(enumerate(sequences))
        add_biases(logits, {row: one.bias for row, one in rows if one.bias is not None})
        forbid(logits, {row: one.end_tokens for row, one in rows if (one.drawn < one.min_tokens or one.thinks) and one.end_tokens.size})
        penalise(logits, {row: (one.penalties, one.seen) for row, one in rows if one.penalties is not None and one.seen.ids.size})
        forbid(logits, {row: ends for row, one in rows if one.bad_words is not None and (ends := one.bad_words.endings()).size})
        allow_only(logits, {row: one.allowed for row, one in rows if one.allowed is not None})
        allow_only(logits, {row: mask for row, one in rows if one.constrained and (mask := _allowed(one)) is not None})


def _mask(token_ids: Sequence[int], vocabulary: int) -> NDArray[np.bool_]:
    """(vocabulary,): true for the tokens named."""
    mask = np.zeros(vocabulary, dtype=np.bool_)
    mask[[token_id for token_id in token_ids if token_id < vocabulary]] = True
    return mask


def _allowed(sequence: _Sequence) -> NDArray[np.bool_] | None:
    """What the grammar allows next, (vocabulary,); None once it cannot be told."""
    assert sequence.grammar is not None  # noqa: S101 - what makes it constrained
    try:
        allowed = sequence.grammar.allowed()
    except GrammarError as error:
        sequence.error = error
        return None
    if sequence.thoughts is not None and sequence.drawn == 0:
        allowed[sequence.thoughts.start_token] = True
    return allowed


def _advance(sequence: _Sequence, token_id: int) -> bool:
    """Tell the grammar of the token; whether it ends there."""
    if sequence.grammar is None:
        return False
    thoughts = sequence.thoughts
    if thoughts is not None and sequence.thinks:
        sequence.thinks = token_id != thoughts.end_token
    elif thoughts is not None and sequence.drawn == 0 and token_id == thoughts.start_token:
        sequence.thinks = True
    elif sequence.constrained:
        try:
            sequence.grammar.accept(token_id)
        except GrammarError as error:
            sequence.error = error
            return False
        return sequence.grammar.ended
    return False
