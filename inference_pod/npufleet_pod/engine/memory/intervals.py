"""Free ranges of an address space: split when taken, merged when given back. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from npufleet_pod.engine.memory.errors import MemoryStateError


class FreeIntervals:
    """Free ranges of [0, size), kept by start and by length. Two free ranges never touch: they would be one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_start: dict[int, int] = {}
        self._starts: list[int] = []
        self._by_length: list[tuple[int, int]] = []
        self._free = 0
        if size:
            self._add(0, size)

    @property
    def free(self) -> int:
        """Units that are free."""
        return self._free

    @property
    def largest(self) -> int:
        """Length of the longest free range."""
        return self._by_length[-1][0] if self._by_length else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Free ranges as (start, length), in order of start."""
        return iter([(start, self._by_start[start]) for start in self._starts])

    def __len__(self) -> int:
        return len(self._by_start)

    def length_at(self, start: int) -> int:
        """Length of the free range that begins at `start`, 0 where none does."""
        return self._by_start.get(start, 0)

    def take(self, length: int, fit: int | None = None) -> int | None:
        """Take `length` units from the shortest range that holds `fit` (by default `length`), else from the longest; None if none does."""
        index = bisect_left(self._by_length, (length if fit is None else max(length, fit), -1))
        if index == len(self._by_length):
            index -= 1
        if index < 0 or self._by_length[index][0] < length:
            return None
        start = self._by_length[index][1]
        self._cut(start, length)
        return start

    def take_at(self, start: int, length: int) -> bool:
        """Take `length` units from the range that begins at `start`; False if it is shorter, or none begins there."""
        if self.length_at(start) < length:
            return False
        self._cut(start, length)
        return True

    def take_longest(self, length: int) -> tuple[int, int] | None:
        """Take up to `length` units from the longest range, as (start, taken); None if nothing is free."""
        if not self._by_length:
            return None
        available, start = self._by_length[-1]
        taken = min(available, length)
        self._cut(start, taken)
        return start, taken

    def give(self, start: int, length: int) -> None:
        """Free [start, start + length) and merge it with its neighbours. Raises MemoryStateError if a part of it is free, or outside."""
        if length < 1 or start < 0 or start + length > self._size:
            raise MemoryStateError(f"[{start}, {start + length}) is not inside [0, {self._size}): give back what was taken")
        index = bisect_left(self._starts, start)
        before = self._starts[index - 1] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        if after is not None and after < start + length:
            raise MemoryStateError(f"[{start}, {start + length}) is freed twice: [{after}, {after + self._by_start[after]}) is free")
        if before is not None and before + self._by_start[before] > start:
            raise MemoryStateError(f"[{start}, {start + length}) is freed twice: [{before}, {before + self._by_start[before]}) is free")
        if after == start + length:
            length += self._by_start[after]
            self._remove(after)
        if before is not None and before + self._by_start[before] == start:
            length += start - before
            self._remove(before)
            start = before
        self._add(start, length)

    def check(self) -> None:
        """Raise MemoryStateError if ranges overlap, touch, leave the space, or are counted wrongly."""
        if self._starts != sorted(self._by_start):
            raise MemoryStateError("the starts of the free ranges differ from the ranges")
        end = -1
        for start, length in self:
            if start <= end or length < 1 or start + length > self._size:
                raise MemoryStateError(f"free range [{start}, {start + length}) touches its neighbour or leaves [0, {self._size})")
            end = start + length
        total = sum(self._by_start.values())
        if total != self._free or sorted((length, start) for start, length in self._by_start.items()) != self._by_length:
            raise MemoryStateError(f"free ranges sum to {total}, {self._free} are counted: the lists of free ranges differ")

    def _cut(self, start: int, length: int) -> None:
        whole = self._by_start[start]
        self._remove(start)
        if whole > length:
            self._add(start + length, whole - length)

    def _add(self, start: int, length: int) -> None:
        self._by_start[start] = length
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._free += length

    def _remove(self, start: int) -> None:
        length = self._by_start.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self._free -= length
