"""How far a fetch is and how fast, for whoever asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from npufleet_api.fetching import FetchPhase, FetchProgress

WINDOW_SECONDS = 20.0
SAMPLE_SECONDS = 0.5


class Meter:
    """Used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase = FetchPhase.LISTING
        self.total = 0
        self.done = 0
        self.fetched = 0
        """Of `done`, what came over the network in this process."""
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def enter(self, phase: FetchPhase) -> None:
        """Begin a phase."""
        self.phase = phase

    def add(self, count: int) -> None:
        """`count` further bytes came over the network; negative where they have to come again."""
        self.done += count
        self.fetched += max(0, count)
        now = self._clock()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, self.fetched))
        while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def progress(self) -> FetchProgress:
        """As it stands. The rate is that of the last WINDOW_SECONDS."""
        since, before = self._samples[0]
        elapsed = self._clock() - since
        rate = int((self.fetched - before) / elapsed) if elapsed > 0 else 0
        left = max(0, self.total - self.done)
        return FetchProgress(
            phase=self.phase,
            bytes_done=max(0, self.done),
            bytes_total=self.total,
            bytes_per_second=rate,
            seconds_left=-(-left // rate) if rate > 0 and self.phase is FetchPhase.DOWNLOADING else None,
        )
