"""Circuit breaker of one replica. Pure but for the times that it is given.

closed ──failure──► open ──its time has passed──► half-open ──the probe succeeds──► closed
                     ▲                                │
                     └──── the probe fails, for twice as long ────┘

One failure opens it: a replica that refuses a connection or answers 502 costs each further request an attempt, and others are there to take
them.
"""

from __future__ import annotations

from enum import StrEnum

FIRST_OPEN_SECONDS = 0.5
LONGEST_OPEN_SECONDS = 15.0
DRAINING_SECONDS = 2.0
"""A replica that says it drains is usually out of the view before this has passed; if the drain was cancelled, it comes back."""


class BreakerState(StrEnum):
    """Whether a replica gets requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One request at a time finds out."""


class Breaker:
    """What is known of a replica's failures."""

    __slots__ = ("failures", "open_until", "probing")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.open_until = 0.0
        self.probing = False
        """A request that was let through half-open is under way."""

    def state(self, now: float) -> BreakerState:
        """The state at `now`."""
        if now < self.open_until:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self.failures else BreakerState.CLOSED

    def lets_through(self, now: float) -> bool:
        """Whether a request may be sent while others are there to take it."""
        return self.open_until <= now and not (self.failures and self.probing)

    def succeeded(self) -> None:
        """The replica answered."""
        self.failures = 0
        self.open_until = 0.0
        self.probing = False

    def failed(self, now: float) -> None:
        """The replica could not be reached or is not ready. What was sent before it opened and fails later says nothing new."""
        if now < self.open_until:
            return
        self.failures += 1
        self.probing = False
        self.open_until = now + min(LONGEST_OPEN_SECONDS, FIRST_OPEN_SECONDS * 2.0 ** min(self.failures - 1, 16))

    def draining(self, now: float) -> None:
        """The replica refused because it drains: no failure."""
        self.probing = False
        self.open_until = max(self.open_until, now + DRAINING_SECONDS)
