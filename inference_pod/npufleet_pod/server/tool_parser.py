"""Finds calls of tools in what a model writes, as it comes. Pure: the same text gives the same calls however it is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from npufleet_pod.server.call_object import SPACE, CallObject
from npufleet_pod.server.delta import CallDelta, Delta
from npufleet_pod.server.marker import find_first, held_from

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class ToolParser(Protocol):
    """Takes a model's text piece by piece."""

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        ...

    def push(self, text: str) -> Delta:
        """What `text` makes certain."""
        ...

    def finish(self) -> Delta:
        """What was held back, at the answer's end."""
        ...


class _Calls:
    """Numbers calls and passes their parts on, up to a limit."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.count = 0
        self._named = False

    def begin(self) -> None:
        self._named = False

    @property
    def named(self) -> bool:
        """Whether the present call's name was given out, so that it cannot be taken back."""
        return self._named

    def report(self, call: CallObject, delta: Delta) -> None:
        """Add what is new of `call`."""
        if call.name is None:
            return
        name = None
        if not self._named:
            self._named, self.count, name = True, self.count + 1, call.name
        arguments = call.take_arguments()
        if (name is not None or arguments) and (self._limit is None or self.count <= self._limit):
            delta.calls.append(CallDelta(self.count - 1, arguments, name))


class _State(Enum):
    BEGIN = auto()
    TEXT = auto()
    CALL = auto()
    AFTER = auto()


class _StateParser(ABC):
    """What the formats share: text is held until a step can take it."""

    def __init__(self, state: _State, limit: int | None) -> None:
        self._calls = _Calls(limit)
        self._state = state
        self._held = ""
        self._call = CallObject()

    @property
    def called(self) -> bool:
        return self._calls.count > 0

    def push(self, text: str) -> Delta:
        delta, self._held = Delta(), self._held + text
        while self._held and self._step(delta):
            pass
        return delta

    @abstractmethod
    def _step(self, delta: Delta) -> bool:
        """Take what can be taken; False if more has to come."""


class HermesParser(_StateParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, among text: Hermes and Qwen. What is no call after all is text."""

    def __init__(self, limit: int | None = None) -> None:
        """limit: further calls are dropped."""
        super().__init__(_State.TEXT, limit)

    def finish(self) -> Delta:
        held, self._held = self._held, ""
        if self._state is _State.CALL and not self._calls.named:
            return Delta(CALL_START + self._call.raw + held)
        if self._state is _State.TEXT:
            return Delta(held.rstrip(SPACE) if self.called else held)
        return Delta()

    def _step(self, delta: Delta) -> bool:
        if self._state is _State.TEXT:
            return self._text(delta)
        if self._state is _State.CALL:
            return self._in_call(delta)
        found = find_first(self._held, (CALL_END, CALL_START))
        if found is None:
            self._held = self._held[held_from(self._held, (CALL_END, CALL_START)) :]
            return False
        place, mark = found
        self._held = self._held[place + len(mark) :]
        self._enter(_State.CALL if mark == CALL_START else _State.TEXT)
        return True

    def _text(self, delta: Delta) -> bool:
        found = find_first(self._held, (CALL_START,))
        end = found[0] if found is not None else held_from(self._held, (CALL_START,), SPACE)
        given = self._held[:end].rstrip(SPACE) if found is not None else self._held[:end]
        delta.content += given
        if found is None:
            self._held = self._held[end:]
            return False
        self._held = self._held[end + len(CALL_START) :]
        self._enter(_State.CALL)
        return True

    def _in_call(self, delta: Delta) -> bool:
        call = self._call
        self._held = self._held[call.push(self._held) :]
        self._calls.report(call, delta)
        if call.complete or (call.broken and self._calls.named):
            self._enter(_State.AFTER)
            return True
        if call.broken:
            delta.content += CALL_START + call.raw
            self._enter(_State.TEXT)
            return True
        return False

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.CALL:
            self._call = CallObject()
            self._calls.begin()


class LlamaParser(_StateParser):
    """An answer that is nothing but calls, `{"name": …, "parameters": …}`, divided by semicolons: Llama 3. Any other answer is text."""

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        """names: of the tools; an object with another name is an answer. limit: further calls are dropped."""
        super().__init__(_State.BEGIN, limit)
        self._names = names
        self._before = ""
        """What stood before the present call."""

    def finish(self) -> Delta:
        held, self._held = self._held, ""
        if self._state is _State.CALL and not self._calls.named:
            return Delta(self._before + self._call.raw + held)
        return Delta() if self.called and self._state is not _State.TEXT else Delta(held)

    def _step(self, delta: Delta) -> bool:
        if self._state is _State.TEXT:
            delta.content, self._held = delta.content + self._held, ""
            return False
        if self._state is _State.CALL:
            return self._in_call(delta)
        rest = self._held.lstrip(SPACE if self._state is _State.BEGIN else SPACE + ";,")
        if self._state is _State.BEGIN and rest.startswith(PYTHON_TAG):
            rest = rest[len(PYTHON_TAG) :].lstrip(SPACE)
        if not rest or (self._state is _State.BEGIN and PYTHON_TAG.startswith(rest)):
            return False
        if rest[0] != "{":
            self._held = rest if self.called else self._held
            self._state = _State.TEXT
            return True
        self._before, self._held = "" if self.called else self._held[: len(self._held) - len(rest)], rest
        self._state, self._call = _State.CALL, CallObject()
        self._calls.begin()
        return True

    def _in_call(self, delta: Delta) -> bool:
        call = self._call
        self._held = self._held[call.push(self._held) :]
        if not self._calls.named and (call.broken if call.name is None else call.name not in self._names):
            delta.content += self._before + call.raw
            self._state = _State.TEXT
            return True
        self._calls.report(call, delta)
        if call.complete or call.broken:
            self._state = _State.AFTER if call.complete else _State.TEXT
            return True
        return False
