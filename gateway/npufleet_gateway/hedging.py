"""When a stream that has not begun is asked for a second time, at another replica. Pure.

The delay is a percentile of the time that the model's replicas took to the first bytes of their streams, as this gateway saw it; while too
few were seen nothing is hedged (Dean and Barroso, "The Tail at Scale", 2013). Each stream earns its model a share of a copy, and a copy
costs a whole one, so that copies stay within that share of streams at every moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from npufleet_gateway.routing import ModelKey

LATEST_STREAMS = 512
"""The delay follows so many of a model's latest streams."""
LEAST_STREAMS = 64
RECKON_EVERY = 16
"""The percentile is reckoned anew after so many streams."""
MOST_CREDIT = 10.0
"""Copies that a quiet model can have saved up."""


class HedgeResult(StrEnum):
    """What became of a stream that was late; a metric label."""

    WON = "won"
    """The copy answered first."""
    LOST = "lost"
    """The copy did not."""
    OVER_BUDGET = "over_budget"
    BUSY = "busy"
    """Others wait for the model's slots, or all are in use: a copy would take from them."""
    NO_REPLICA = "no_replica"
    """No other replica against which nothing speaks."""


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """`delay_percentile` of the times to a stream's first bytes; `budget_percent` of streams may be copied."""

    delay_percentile: float = 95
    budget_percent: float = 5


class _Streams:
    __slots__ = ("credit", "delay", "latest", "since")

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=LATEST_STREAMS)
        self.since = 0
        self.delay: float | None = None
        self.credit = 0.0


class Hedges:
    """Delays and budgets of all models of a gateway."""

    def __init__(self, policy: HedgePolicy) -> None:
        self._policy = policy
        self._streams: dict[ModelKey, _Streams] = {}

    def asked(self, key: ModelKey) -> float | None:
        """A stream of the model is sent to a replica: after so many seconds without its first byte it is late. None: not to be told yet."""
        streams = self._streams.get(key)
        if streams is None:
            streams = self._streams[key] = _Streams()
        streams.credit = min(MOST_CREDIT, streams.credit + self._policy.budget_percent / 100)
        return streams.delay

    def began(self, key: ModelKey, seconds: float) -> None:
        """The first replica's answer began after `seconds`, or had not by then when the copy's did."""
        streams = self._streams.get(key)
        if streams is None:
            return
        streams.latest.append(seconds)
        streams.since += 1
        if len(streams.latest) >= LEAST_STREAMS and (streams.delay is None or streams.since >= RECKON_EVERY):
            ordered = sorted(streams.latest)
            streams.delay = ordered[math.ceil(len(ordered) * self._policy.delay_percentile / 100) - 1]
            streams.since = 0

    def take(self, key: ModelKey) -> bool:
        """Whether the budget has a copy left; it is then spent."""
        streams = self._streams.get(key)
        if streams is None or streams.credit < 1:
            return False
        streams.credit -= 1
        return True

    def give_back(self, key: ModelKey) -> None:
        """A copy that was taken and not sent."""
        streams = self._streams.get(key)
        if streams is not None:
            streams.credit += 1

    def retain(self, keys: Collection[ModelKey]) -> None:
        """Forget models that are gone."""
        self._streams = {key: streams for key, streams in self._streams.items() if key in keys}
