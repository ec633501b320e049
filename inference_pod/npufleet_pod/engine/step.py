"""One decision of the scheduler, and the sequences that decisions are about. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.layout import CacheScope, Transfer

FUTURE_TOKEN = -1
"""Stands for a token that a step in flight will choose."""


@dataclass(frozen=True, slots=True)
class Step:
    """What is computed together: `tokens[request]` tokens of each request, in batch order, from position `starts[request]` on."""

    number: int
    tokens: Mapping[str, int]
    starts: Mapping[str, int]
    inputs: Mapping[str, Sequence[int]]
    """The tokens themselves; FUTURE_TOKEN for one that an earlier step in flight chooses."""
    samples: frozenset[str]
    """Requests that get a new token, since the step computes the last of those they have."""
    tables: Mapping[str, HierarchicalBlockTable]
    """Where each request's tokens lie, as it was when the step was decided."""
    preempted: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    """To be done before the step computes, in order."""

    @property
    def token_count(self) -> int:
        """Tokens of all requests."""
        return sum(self.tokens.values())


@dataclass(slots=True)
class SequenceState:
    """A request as the scheduler sees it. `tokens` are prompt and answer so far."""

    request_id: str
    arrival: int
    priority: int
    max_tokens: int
    scope: CacheScope
    tokens: list[int]
    prompt_tokens: int = field(init=False)
    scheduled: int = 0
    """Tokens whose KV is computed, or will be by the steps in flight."""
    computed: int = 0
    pending: int = 0
    """Tokens that the steps in flight will add."""
    in_flight: int = 0
    """Steps in flight that compute it."""
    waits_since: int = 0
    """Number of the step before which it began to wait."""
    started: bool = False
    """Whether it ever ran; a newcomer did not."""
    yielded: bool = False
    """Whether it once made room for a newcomer; it does so only once."""
    protected: bool = False
    """Whether it was admitted because it had waited too long: it makes room for no newcomer."""
    ended: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def known(self) -> int:
        """Tokens of prompt and answer, those of the steps in flight included."""
        return len(self.tokens) + self.pending

    @property
    def missing(self) -> int:
        """Tokens that are to be computed next; none once the steps in flight choose the last one."""
        return 0 if self.known - self.prompt_tokens >= self.max_tokens else self.known - self.scheduled

    @property
    def prefills(self) -> bool:
        """Whether more than the newest token is to be computed."""
        return self.missing > 1 or self.scheduled < self.prompt_tokens

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Order among running requests, best first: who is last gives its memory up first."""
        return (not self.protected, self.priority, self.arrival)

    def take(self, count: int) -> tuple[Sequence[int], bool]:
        """Put the next `count` tokens into a step; returns them, and whether the step chooses a new one."""
        start, end = self.scheduled, self.scheduled + count
        taken = [*self.tokens[start:end], *[FUTURE_TOKEN] * (end - max(start, len(self.tokens)))]
        self.scheduled = end
        self.in_flight += 1
        samples = end == self.known
        self.pending += samples
        return taken, samples

    def restart(self) -> None:
        """Forget what was computed. Nothing of it may be in flight."""
        self.scheduled = self.computed = 0
