"""Requests that wait for memory or a seat. Imports no torch."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from npufleet_pod.engine.step import SequenceState


class WaitingQueue:
    """Gives out the most urgent request: by priority, then newcomers before those that made room for one, then first come.

    Whoever has waited for `starvation_steps` steps goes before all of them, the longest waiting first.
    """

    def __init__(self, starvation_steps: int) -> None:
        self._starvation_steps = starvation_steps
        self._by_wait: OrderedDict[str, SequenceState] = OrderedDict()
        """In the order in which they began to wait."""
        self._heap: list[tuple[int, bool, int, int, SequenceState]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._by_wait)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_wait

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._by_wait.values())

    def push(self, sequence: SequenceState, step: int) -> None:
        """Let `sequence` wait from before step `step` on."""
        sequence.waits_since = step
        self._by_wait[sequence.request_id] = sequence
        self._pushes += 1
        heapq.heappush(self._heap, (sequence.priority, sequence.yielded, sequence.arrival, self._pushes, sequence))

    def starving(self, step: int) -> SequenceState | None:
        """Who has waited longest, if that is too long."""
        oldest = next(iter(self._by_wait.values()), None)
        return oldest if oldest is not None and step - oldest.waits_since >= self._starvation_steps else None

    def first(self, step: int) -> SequenceState | None:
        """Who is next, without taking it; None if nobody waits."""
        starving = self.starving(step)
        if starving is not None:
            return starving
        while self._heap:
            sequence = self._heap[0][-1]
            if self._by_wait.get(sequence.request_id) is sequence and self._heap[0][1] == sequence.yielded:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: str) -> SequenceState | None:
        """Take a request out; None if it does not wait."""
        sequence = self._by_wait.pop(request_id, None)
        if len(self._heap) > 2 * len(self._by_wait) + 64:
            self._heap = [entry for entry in self._heap if self._by_wait.get(entry[-1].request_id) is entry[-1]]
            heapq.heapify(self._heap)
        return sequence
