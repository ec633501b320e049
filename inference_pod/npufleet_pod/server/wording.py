"""How OpenAI words answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from npufleet_pod.engine.request import FinishReason


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


class Wording(Protocol):
    """Builds the JSON of one answer."""

    def whole(self, texts: list[str], endings: list[Ending], usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""
        ...

    def text_chunk(self, index: int, text: str, first: bool) -> dict[str, Any]:
        """A piece of a choice's text."""
        ...

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
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

    def whole(self, texts: list[str], endings: list[Ending], usage: Usage) -> dict[str, Any]:
        choices = [
            {"index": index, "text": text, "logprobs": None, **ending.as_dict()}
            for index, (text, ending) in enumerate(zip(texts, endings, strict=True))
        ]
        return {**self._head(), "choices": choices, "usage": usage.as_dict()}

    def text_chunk(self, index: int, text: str, first: bool) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {**self._head(), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
        return {**self._head(), "choices": [{"index": index, "text": "", "logprobs": None, **ending.as_dict()}]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(), "choices": []}

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "object": "text_completion", "created": self.created_unix, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatWording:
    """`chat.completion` and `chat.completion.chunk` objects."""

    answer_id: str
    created_unix: int
    model: str

    def whole(self, texts: list[str], endings: list[Ending], usage: Usage) -> dict[str, Any]:
        choices = [
            {"index": index, "message": {"role": "assistant", "content": text}, "logprobs": None, **ending.as_dict()}
            for index, (text, ending) in enumerate(zip(texts, endings, strict=True))
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage.as_dict()}

    def text_chunk(self, index: int, text: str, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def end_chunk(self, index: int, ending: Ending) -> dict[str, Any]:
        return {
            **self._head("chat.completion.chunk"),
            "choices": [{"index": index, "delta": {}, "logprobs": None, **ending.as_dict()}],
        }

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": []}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created_unix, "model": self.model}
