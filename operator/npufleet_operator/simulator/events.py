"""Simulated time: a heap of what happens next. Equal times happen in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Time in seconds, which moves from event to event."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self._heap: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, time: float, action: Action) -> None:
        """Let `action` happen at `time`; a time that has passed is now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def after(self, seconds: float, action: Action) -> None:
        """Let `action` happen in `seconds`."""
        self.at(self.now + seconds, action)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Let happen what is due up to `until`, or until `done` says so after an event."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if done():
                return
        self.now = until
