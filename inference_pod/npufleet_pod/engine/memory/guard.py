"""Compares a replacement policy with plain recency while both run. Imports no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

SLACK_SHARE = 0.005
"""Hits, as a share of the capacity, that prediction may lose to recency before it is suspended."""
MIN_SLACK_HITS = 16
FIRST_PAUSE_USES = 2
"""First suspension in uses per page of capacity; each further one lasts twice as long, so that all losses together stay bounded."""


class RecencyGuard:
    """Keeps an LRU cache of keys alone beside the real one, and says whether prediction has earned its keep."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._shadow: OrderedDict[Hashable, None] = OrderedDict()
        self._slack = max(MIN_SLACK_HITS, int(capacity * SLACK_SHARE))
        self._pause = FIRST_PAUSE_USES * capacity
        self._paused_uses = 0
        self._lead = 0
        self._peak = 0

    @property
    def lead(self) -> int:
        """Hits beyond those that LRU would have had."""
        return self._lead

    @property
    def trusted(self) -> bool:
        """Whether to replace by prediction; by recency otherwise."""
        return self._paused_uses == 0

    def extend(self, keys: Sequence[Hashable]) -> None:
        """Pages that were made, not looked for."""
        for key in keys:
            self._shadow[key] = None
            self._shadow.move_to_end(key)
        while len(self._shadow) > self._capacity:
            self._shadow.popitem(last=False)

    def record(self, keys: Sequence[Hashable], hits: int) -> None:
        """Pages used in order, of which the real cache held `hits`."""
        shadow = self._shadow
        recency_hits = 0
        for key in keys:
            if key in shadow:
                recency_hits += 1
                shadow.move_to_end(key)
            else:
                shadow[key] = None
                if len(shadow) > self._capacity:
                    shadow.popitem(last=False)
        self._lead += hits - recency_hits
        if self._paused_uses:
            self._paused_uses = max(0, self._paused_uses - len(keys))
            self._peak = self._lead
            return
        self._peak = max(self._peak, self._lead)
        if self._lead < 0 and self._peak - self._lead > self._slack:
            self._paused_uses = self._pause
            self._pause *= 2
