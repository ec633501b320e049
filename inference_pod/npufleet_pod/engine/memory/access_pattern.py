"""Predicts which cached pages will be used again, from how conversations use theirs. Imports no torch.

A conversation comes back with its whole prefix and something new behind it. So what tells whether a page will be used is less how often
it was than what its last request was: how much that added, the how many-th turn it was, and whether the page is at its end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from enum import IntEnum

from npufleet_pod.engine.memory.guard import RecencyGuard
from npufleet_pod.engine.memory.reuse_model import AGE_EDGES_SECONDS, BINS, Kind, ReuseModel

MAX_GENERATION = 6
MAX_SIZE_CLASS = 12
REFIT_REQUESTS = 200
"""Requests after which the values are computed anew from what was learned."""
FORGET_MARGIN = 1.1
TRACKED_PER_PAGE = 16
MIN_TRACKED = 1 << 16


class Tier(IntEnum):
    """Where a page's content is, the fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


TIERS = tuple(Tier)


class _Page:
    __slots__ = ("generation", "group", "tier")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.group: _Group | None = None
        self.tier: Tier | None = None


class _Group:
    """Pages of one kind that one request used: they age together."""

    __slots__ = ("age_bin", "evictable", "kind", "members", "number", "since", "weight")

    def __init__(self, number: int, kind: Kind, since: float, members: int) -> None:
        self.number = number
        self.kind = kind
        self.since = since
        self.age_bin = 0
        # Each request counts as one observation however long it is: its pages are used together or not at all.
        self.weight = 1.0 / members
        self.members: dict[Hashable, _Page] = {}
        self.evictable: tuple[dict[Hashable, None], ...] = tuple({} for _ in TIERS)

    @property
    def entered(self) -> float:
        return self.since + AGE_EDGES_SECONDS[self.age_bin]


_Cell = tuple[Kind, int]


class PredictiveAccessPattern:
    """Ranks the evictable pages of each tier by the expected hits per second of memory. Keys name a page's content and its prefix.

    A page that nobody holds is evictable (`add`); one that is held, or is gone, is not (`remove`), but both are still observed, up to
    `tracked` pages. `capacity` is that of the device, for the comparison with recency. Times are seconds of any clock that never runs back.
    """

    def __init__(self, capacity: int, *, tracked: int | None = None) -> None:
        self._model = ReuseModel()
        self._guard = RecencyGuard(capacity)
        self._tracked = max(MIN_TRACKED, TRACKED_PER_PAGE * capacity) if tracked is None else tracked
        self._pages: dict[Hashable, _Page] = {}
        self._groups: dict[int, _Group] = {}
        self._timers: list[tuple[float, int]] = []
        self._cells: tuple[defaultdict[_Cell, dict[int, _Group]], ...] = tuple(defaultdict(dict) for _ in TIERS)
        self._queues: tuple[list[tuple[float, _Cell]], ...] = tuple([] for _ in TIERS)
        self._queued: tuple[set[_Cell], ...] = tuple(set() for _ in TIERS)
        self._oldest: tuple[list[int], ...] = tuple([] for _ in TIERS)
        self._values: dict[Kind, list[float]] = {}
        self._evictable = [0] * len(TIERS)
        self._numbers = 0
        self._requests = 0
        self._now = 0.0

    @property
    def guard(self) -> RecencyGuard:
        """The comparison with LRU."""
        return self._guard

    def evictable(self, tier: Tier) -> int:
        """Evictable pages of a tier."""
        return self._evictable[tier]

    def use(self, keys: Sequence[Hashable], device_hits: int, now: float) -> None:
        """A request uses the pages `keys`, its whole prefix in order; `device_hits` of them were on the device."""
        self._advance(now)
        self._guard.record(keys, device_hits)
        known = 0
        for key in keys:
            if key not in self._pages:
                break
            known += 1
        generation = (self._pages[keys[known - 1]].generation if known else 0) + 1
        size_class = min((len(keys) - known).bit_length(), MAX_SIZE_CLASS)
        members: defaultdict[Kind, list[Hashable]] = defaultdict(list)
        for index, key in enumerate(keys):
            kind: Kind = (int(index == len(keys) - 1), int(index >= known), size_class, min(generation, MAX_GENERATION))
            members[kind].append(key)
        for kind, group_keys in members.items():
            self._regroup(group_keys, kind, generation, used=True)
        self._requests += 1
        if self._requests % REFIT_REQUESTS == 0:
            self._refit()
        self._forget()

    def extend(self, parent: Hashable | None, keys: Sequence[Hashable], now: float) -> None:
        """Pages that were made behind `parent` by the request that used it last: they will be used when it is."""
        self._advance(now)
        new = [key for key in keys if key not in self._pages]
        page = None if parent is None else self._pages.get(parent)
        kind: Kind = (0, 1, 1, 1)
        if page is not None and page.group is not None:
            kind = (0, 1, *page.group.kind[2:])
        self._guard.extend(keys)
        if new:
            self._regroup(new, kind, 1 if page is None else page.generation, used=False)
            self._forget()

    def add(self, key: Hashable, tier: Tier) -> None:
        """The page is on `tier` and nobody holds it."""
        page = self._pages.get(key)
        if page is None:
            self.extend(None, [key], self._now)
            page = self._pages[key]
        if page.tier is not None:
            self.remove(key)
        group = page.group
        assert group is not None, "a tracked page is in a group"  # noqa: S101 - narrows the type; _regroup sets it
        page.tier = tier
        self._evictable[tier] += 1
        if not group.evictable[tier]:
            self._offer(group, tier)
            heapq.heappush(self._oldest[tier], group.number)
        group.evictable[tier][key] = None

    def remove(self, key: Hashable) -> None:
        """The page is held, moved or gone; no error if it was not evictable."""
        page = self._pages.get(key)
        if page is None or page.tier is None or page.group is None:
            return
        tier, group = page.tier, page.group
        page.tier = None
        self._evictable[tier] -= 1
        del group.evictable[tier][key]
        if not group.evictable[tier]:
            del self._cells[tier][group.kind, group.age_bin][group.number]

    def victim(self, tier: Tier) -> Hashable | None:
        """The evictable page of `tier` that is worth least, the deepest of its request; None if there is none. It stays evictable."""
        group = self._least_valued(tier) if self._guard.trusted else self._least_recent(tier)
        return None if group is None else next(reversed(group.evictable[tier]))

    def _least_valued(self, tier: Tier) -> _Group | None:
        queue, cells = self._queues[tier], self._cells[tier]
        while queue:
            cell = cells.get(queue[0][1])
            if cell:
                return next(iter(cell.values()))
            self._queued[tier].discard(heapq.heappop(queue)[1])
        return None

    def _least_recent(self, tier: Tier) -> _Group | None:
        oldest = self._oldest[tier]
        while oldest:
            group = self._groups.get(oldest[0])
            if group is not None and group.evictable[tier]:
                return group
            heapq.heappop(oldest)
        return None

    def _regroup(self, keys: Sequence[Hashable], kind: Kind, generation: int, *, used: bool) -> None:
        group = _Group(self._numbers, kind, self._now, len(keys))
        self._numbers += 1
        self._groups[group.number] = group
        if kind not in self._values:
            self._values[kind] = self._model.values((kind,), self._now)[0]
        for key in keys:
            page = self._pages.get(key)
            tier = None
            if page is None:
                page = self._pages[key] = _Page(generation)
            else:
                tier = page.tier
                self.remove(key)
                self._drop(key, page, used=used)
            page.group = group
            group.members[key] = page
            if tier is not None:
                self.add(key, tier)
        self._model.enter(kind, 0, group.weight * len(keys), self._now)
        heapq.heappush(self._timers, (self._now + AGE_EDGES_SECONDS[1], group.number))

    def _drop(self, key: Hashable, page: _Page, *, used: bool) -> None:
        group = page.group
        if group is None:
            return
        self._model.leave(group.kind, group.age_bin, group.weight, group.entered, self._now, used=used)
        del group.members[key]
        if not group.members:
            del self._groups[group.number]

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)
        while self._timers and self._timers[0][0] <= self._now:
            number = heapq.heappop(self._timers)[1]
            group = self._groups.get(number)
            if group is None:
                continue
            weight = group.weight * len(group.members)
            left = group.since + AGE_EDGES_SECONDS[group.age_bin + 1]
            self._model.leave(group.kind, group.age_bin, weight, group.entered, left, used=False)
            for tier in TIERS:
                self._cells[tier][group.kind, group.age_bin].pop(number, None)
            group.age_bin += 1
            self._model.enter(group.kind, group.age_bin, weight, left)
            for tier in TIERS:
                if group.evictable[tier]:
                    self._offer(group, tier)
            if group.age_bin + 1 < BINS:
                heapq.heappush(self._timers, (group.since + AGE_EDGES_SECONDS[group.age_bin + 1], number))

    def _offer(self, group: _Group, tier: Tier) -> None:
        cell = (group.kind, group.age_bin)
        self._cells[tier][cell][group.number] = group
        if cell not in self._queued[tier]:
            self._queued[tier].add(cell)
            heapq.heappush(self._queues[tier], (self._values[group.kind][group.age_bin], cell))

    def _refit(self) -> None:
        self._model.decay(self._now)
        kinds = self._model.kinds
        self._values = dict(zip(kinds, self._model.values(kinds, self._now), strict=True))
        for tier in TIERS:
            filled = [cell for cell, groups in self._cells[tier].items() if groups]
            self._queues[tier][:] = [(self._values[kind][age_bin], (kind, age_bin)) for kind, age_bin in filled]
            heapq.heapify(self._queues[tier])
            self._queued[tier].clear()
            self._queued[tier].update(filled)
            # Numbers rise, so a list in their order is a heap.
            self._oldest[tier][:] = [number for number, group in self._groups.items() if group.evictable[tier]]

    def _forget(self) -> None:
        """Stop observing the pages that are held or gone and were used longest ago, once there are too many."""
        excess = len(self._pages) - sum(self._evictable) - self._tracked
        if excess <= self._tracked * (FORGET_MARGIN - 1):
            return
        for group in list(self._groups.values()):
            for key, page in list(group.members.items()):
                if page.tier is None and excess > 0:
                    self._drop(key, page, used=False)
                    del self._pages[key]
                    excess -= 1
            if excess <= 0:
                return
