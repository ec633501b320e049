"""What the engine is asked for and what it answers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from npufleet_pod.errors import GenerationError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """None: the engine draws one."""

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


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stop: StopParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    skip_special_tokens: bool = True


class FinishReason(StrEnum):
    """Why a generation ended, in the words of OpenAI's API and of vLLM's metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. `text` is empty while bytes or a possible stop string are held back."""

    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the generation; None for the end of sequence."""


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """The engine gave the generation up."""

    error: GenerationError


Output = TokenOutput | GenerationFailed
