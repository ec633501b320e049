"""How OpenAI words answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from npufleet_pod.engine.request import FinishReason
from npufleet_pod.server.logprobs import ScoredToken, chat_logprobs, completion_logprobs
from npufleet_pod.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int

    def as_dict(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended."""

    reason: FinishReason
    stop: str | int | None

    def as_dict(self) -> dict[str, Any]:
        """Fields of a choice."""
        return {"finish_reason": self.reason.value, "stop_reason": self.stop}


@dataclass(slots=True)
class Choice:
    """One answer of several, once it is whole."""

    ending: Ending
    text: list[str] = field(default_factory=list)
    scored: list[ScoredToken] | None = None
    """None: no log probabilities were asked for."""


Scored = Sequence[ScoredToken] | None


class Wording(Protocol):
    """Builds the JSON of one answer. scored: None or empty where there are no log probabilities to tell."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def text_chunk(self, index: int, text: str, first: bool, scored: Scored) -> dict[str, Any]:
        """A piece of a choice's text; `first` if it is the choice's first chunk."""
        ...

    def end_chunk(self, index: int, ending: Ending, first: bool, scored: Scored) -> dict[str, Any]:
        """The end of a choice."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """A chunk without choices, to which usage is added."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionWording:
    """`text_completion` objects."""

    answer_id: str
    created_unix: int
    model: str
    tokenizer: TextTokenizer

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        worded = []
        for index, choice in enumerate(choices):
            logprobs = None if choice.scored is None else completion_logprobs(choice.scored, self.tokenizer)
            worded.append({"index": index, "text": "".join(choice.text), "logprobs": logprobs, **choice.ending.as_dict()})
        return {**self._head(), "choices": worded, "usage": usage.as_dict()}

    def text_chunk(self, index: int, text: str, first: bool, scored: Scored) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": self._logprobs(scored), "finish_reason": None}
        return {**self._head(), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending, first: bool, scored: Scored) -> dict[str, Any]:
        choice = {"index": index, "text": "", "logprobs": self._logprobs(scored), **ending.as_dict()}
        return {**self._head(), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(), "choices": []}

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        return completion_logprobs(scored, self.tokenizer) if scored else None

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "object": "text_completion", "created": self.created_unix, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatWording:
    """`chat.completion` and `chat.completion.chunk` objects."""

    answer_id: str
    created_unix: int
    model: str
    tokenizer: TextTokenizer

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        worded = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": "".join(choice.text)}
            logprobs = None if choice.scored is None else chat_logprobs(choice.scored, self.tokenizer)
            worded.append({"index": index, "message": message, "logprobs": logprobs, **choice.ending.as_dict()})
        return {**self._head("chat.completion"), "choices": worded, "usage": usage.as_dict()}

    def text_chunk(self, index: int, text: str, first: bool, scored: Scored) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(scored), "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending, first: bool, scored: Scored) -> dict[str, Any]:
        # An answer without text has no other chunk that could tell whose it is.
        delta = {"role": "assistant", "content": ""} if first else {}
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(scored), **ending.as_dict()}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": []}

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        return chat_logprobs(scored, self.tokenizer) if scored else None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created_unix, "model": self.model}
