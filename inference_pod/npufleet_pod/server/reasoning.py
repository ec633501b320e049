"""Parts a thinking model's thoughts from its answer, as they come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from npufleet_pod.engine.request import Thoughts
from npufleet_pod.server.delta import Delta
from npufleet_pod.server.marker import find_first, held_from
from npufleet_pod.tokenizer import TextTokenizer

THINK_START, THINK_END = "<think>", "</think>"
"""Qwen, DeepSeek, GLM and others."""
EDGES = "\n"
"""Dropped where thoughts and answer meet their marks."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of a model whose vocabulary has a token for each."""

    start_token: int
    end_token: int

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template_source: str) -> ReasoningFormat | None:
        """The model's format; None for one that does not think."""
        start, end = tokenizer.token_id(THINK_START), tokenizer.token_id(THINK_END)
        return None if start is None or end is None or THINK_END not in template_source else cls(start, end)

    def thoughts(self, prompt: str) -> Thoughts | None:
        """How an answer to `prompt` begins; None if the prompt has the thoughts already, so that none follow."""
        end = prompt.rstrip()
        return None if end.endswith(THINK_END) else Thoughts(self.start_token, self.end_token, begun=end.endswith(THINK_START))


class _State(Enum):
    UNDECIDED = auto()
    """Nothing but white space so far."""
    THINKS = auto()
    ANSWERS = auto()


class ReasoningSplitter:
    """Thoughts come first, or not at all."""

    def __init__(self, *, begun: bool) -> None:
        """begun: the prompt ends with the mark that begins them."""
        self._state = _State.THINKS if begun else _State.UNDECIDED
        self._held = ""
        self._fresh = True
        """Whether nothing of the present part was given out."""

    def push(self, text: str) -> Delta:
        """What `text` makes certain."""
        delta, self._held = Delta(), self._held + text
        if self._state is _State.UNDECIDED:
            self._decide()
        if self._state is _State.THINKS:
            delta.reasoning = self._think()
        if self._state is _State.ANSWERS:
            delta.content = self._answer()
        return delta

    def finish(self) -> Delta:
        """What was held back, at the answer's end."""
        held, self._held = self._held, ""
        if self._state is _State.THINKS:
            return Delta(reasoning=held.rstrip(EDGES))
        return Delta(content=held)

    def _decide(self) -> None:
        begin = self._held.lstrip()
        if begin.startswith(THINK_START):
            self._held, self._state = begin[len(THINK_START) :], _State.THINKS
        elif begin and not THINK_START.startswith(begin):
            self._state, self._fresh = _State.ANSWERS, False

    def _think(self) -> str:
        found = find_first(self._held, (THINK_END,))
        if found is not None:
            thoughts, self._held = self._held[: found[0]].rstrip(EDGES), self._held[found[0] + len(THINK_END) :]
            thoughts = thoughts.lstrip(EDGES) if self._fresh else thoughts
            self._state, self._fresh = _State.ANSWERS, True
            return thoughts
        return self._give(held_from(self._held, (THINK_END,), EDGES))

    def _answer(self) -> str:
        return self._give(len(self._held))

    def _give(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        if self._fresh:
            given = given.lstrip(EDGES)
            self._fresh = not given
        return given
