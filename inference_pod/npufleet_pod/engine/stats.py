"""What the engine tells about itself. Times are seconds of one monotonic clock. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from npufleet_pod.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's load at one moment."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request at its end."""

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    queue_seconds: float | None
    """None: it never ran."""
    ttft_seconds: float | None
    """None: it ended before its first token."""
    e2e_seconds: float


class EngineObserver(Protocol):
    """Told of what happens; called by the engine's thread, or the event loop's when a request is cancelled. Must not block."""

    def on_step(self, tokens: int, preempted: int) -> None: ...

    def on_prefix_lookup(self, sought: int, found: int) -> None:
        """A request starts: so many prompt tokens were sought in the prefix cache, and so many found."""

    def on_first_token(self, prompt_tokens: int, ttft_seconds: float) -> None: ...

    def on_next_token(self, interval_seconds: float) -> None: ...

    def on_finish(self, finished: FinishedRequest) -> None: ...
