"""What the engine is asked for and what it answers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from npufleet_pod.errors import GenerationError, GrammarError

if TYPE_CHECKING:
    from npufleet_pod.engine.grammar import Grammar

MAX_TOP_LOGPROBS = 20
"""Most alternatives that a request may ask for: OpenAI's limit for chats, and vLLM's."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: the engine draws one."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """What is added to the logit of a token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these may be chosen; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that may not be generated; none is empty."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a generation ends. `max_tokens` counts generated tokens, at least 1."""

    max_tokens: int
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop_string: bool = False


class Pooling(StrEnum):
    """How hidden states become one vector: their mean, or that of the first or last position."""

    MEAN = "mean"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Thoughts:
    """A model's thoughts before its answer: the tokens that begin and end them, and whether the prompt has begun them already."""

    start_token: int
    end_token: int
    begun: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stop: StopParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: no log probabilities; else how many of the likeliest tokens are told besides the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens; each of its positions is then computed, whatever a prefix cache holds."""
    priority: int = 0
    """Lower values are served earlier."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""
    grammar: Grammar | None = None
    """What the answer has to obey; it ends where the grammar does."""
    thoughts: Thoughts | None = None
    """What may come before the grammar begins; None: nothing."""
    pooling: Pooling | None = None
    """None: no vector is wanted; else every position of the prompt is computed, whatever a prefix cache holds."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position, by the logits as the model gave them; finite, at most 0."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What sampling gives for one step of a sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per token of the prompt, None for the first; given with the first token, if asked for."""
    grammar_ended: bool = False
    """Whether nothing may follow by the request's grammar."""
    error: GrammarError | None = None
    """Why the request cannot go on."""
    vector: bytes | None = None
    """The prompt's vector, little-endian float32; given with the first token, if asked for."""


class FinishReason(StrEnum):
    """Why a generation ended, in the words of OpenAI's API and of vLLM's metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class PlacedLogprobs:
    """A token's log probabilities, and the character of the answer at which its text begins."""

    text_offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `text` is empty while bytes or a possible stop string are held back."""

    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the generation; None for the end of sequence."""
    logprobs: tuple[PlacedLogprobs, ...] = ()
    """Of this and earlier tokens, as their text is given out; tokens that a stop cut off have none."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Given with the first token, if asked for."""
    vector: bytes | None = None
    """The same."""


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The engine gave the generation up."""

    error: GenerationError

    @property
    def finish_reason(self) -> FinishReason:
        """As what it counts."""
        return FinishReason.ABORT


Output = TokenOutput | GenerationFailed
