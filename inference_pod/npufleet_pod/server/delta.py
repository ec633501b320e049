"""What a piece of an answer adds to a message: text, thoughts, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one call. Its first part names it."""

    index: int
    arguments: str
    name: str | None = None


@dataclass(slots=True)
class Delta:
    """What one push adds; empty parts add nothing."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def joined(deltas: Iterable[Delta]) -> Delta:
    """All of `deltas` as one, with one part per call."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        for call in delta.calls:
            before = calls.get(call.index)
            calls[call.index] = call if before is None else CallDelta(call.index, before.arguments + call.arguments, before.name)
    return Delta("".join(content), "".join(reasoning), list(calls.values()))
