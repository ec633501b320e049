"""How OpenAI words answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from npufleet_pod.engine.request import FinishReason
from npufleet_pod.server.delta import CallDelta, Delta, joined
from npufleet_pod.server.logprobs import ScoredToken, Speller, chat_logprobs, completion_logprobs


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
    called: bool = False
    """Whether the answer ended with calls of tools."""

    def as_dict(self) -> dict[str, Any]:
        """Fields of a choice."""
        reason = "tool_calls" if self.called and self.reason is FinishReason.STOP else self.reason.value
        return {"finish_reason": reason, "stop_reason": self.stop}


@dataclass(slots=True)
class Choice:
    """One answer of several, once it is whole."""

    ending: Ending
    deltas: list[Delta] = field(default_factory=list)
    scored: list[ScoredToken] | None = None
    """None: no log probabilities were asked for."""


Scored = Sequence[ScoredToken] | None


class Wording(Protocol):
    """Builds the JSON of one answer. scored: None or empty where there are no log probabilities to tell."""

    @property
    def speller(self) -> Speller:
        """How tokens are named."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def delta_chunk(self, index: int, delta: Delta, first: bool, scored: Scored) -> dict[str, Any]:
        """A piece of a choice; `first` if it is the choice's first chunk."""
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
    speller: Speller

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        worded = []
        for index, choice in enumerate(choices):
            logprobs = None if choice.scored is None else completion_logprobs(choice.scored, self.speller)
            worded.append({"index": index, "text": joined(choice.deltas).content, "logprobs": logprobs, **choice.ending.as_dict()})
        return {**self._head(), "choices": worded, "usage": usage.as_dict()}

    def delta_chunk(self, index: int, delta: Delta, first: bool, scored: Scored) -> dict[str, Any]:
        choice = {"index": index, "text": delta.content, "logprobs": self._logprobs(scored), "finish_reason": None}
        return {**self._head(), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending, first: bool, scored: Scored) -> dict[str, Any]:
        choice = {"index": index, "text": "", "logprobs": self._logprobs(scored), **ending.as_dict()}
        return {**self._head(), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(), "choices": []}

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        return completion_logprobs(scored, self.speller) if scored else None

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "object": "text_completion", "created": self.created_unix, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatWording:
    """`chat.completion` and `chat.completion.chunk` objects."""

    answer_id: str
    created_unix: int
    model: str
    speller: Speller

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        worded = []
        for index, choice in enumerate(choices):
            message = _message(joined(choice.deltas))
            logprobs = None if choice.scored is None else chat_logprobs(choice.scored, self.speller)
            worded.append({"index": index, "message": message, "logprobs": logprobs, **choice.ending.as_dict()})
        return {**self._head("chat.completion"), "choices": worded, "usage": usage.as_dict()}

    def delta_chunk(self, index: int, delta: Delta, first: bool, scored: Scored) -> dict[str, Any]:
        worded = {**({"role": "assistant"} if first else {}), **_fields(delta)}
        choice = {"index": index, "delta": worded, "logprobs": self._logprobs(scored), "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending, first: bool, scored: Scored) -> dict[str, Any]:
        # An answer without text has no other chunk that could tell whose it is.
        delta = {"role": "assistant", "content": ""} if first else {}
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(scored), **ending.as_dict()}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": []}

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        return chat_logprobs(scored, self.speller) if scored else None

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created_unix, "model": self.model}


def _message(whole: Delta) -> dict[str, Any]:
    """An answer's message. Its text is null where there are only calls."""
    message: dict[str, Any] = {"role": "assistant", "content": whole.content or (None if whole.calls else "")}
    if whole.reasoning:
        message["reasoning_content"] = whole.reasoning
    if whole.calls:
        message["tool_calls"] = [_call(call) for call in whole.calls]
    return message


def _fields(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
    return fields


def _call(call: CallDelta) -> dict[str, Any]:
    """A call, or in a stream a part of one; the first names it."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
