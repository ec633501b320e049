"""Free ranges."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.intervals import FreeIntervals

SIZE = 64


class IntervalsMachine(RuleBasedStateMachine):
    """Compares with a set of free units."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.intervals = FreeIntervals(SIZE)
        self.free = set(range(SIZE))

    @rule(target=held, length=st.integers(1, 20), fit=st.none() | st.integers(1, SIZE))
    def take(self, length: int, fit: int | None) -> object:
        largest = self.intervals.largest
        start = self.intervals.take(length, fit)
        assert (start is None) == (largest < length)
        return multiple() if start is None else self._taken(start, length)

    @rule(target=held, start=st.integers(0, SIZE - 1), length=st.integers(1, 8))
    def take_at(self, start: int, length: int) -> object:
        return self._taken(start, length) if self.intervals.take_at(start, length) else multiple()

    @rule(target=held, length=st.integers(1, 20))
    def take_longest(self, length: int) -> object:
        part = self.intervals.take_longest(length)
        return multiple() if part is None else self._taken(*part)

    @rule(part=consumes(held))
    def give(self, part: tuple[int, int]) -> None:
        self.intervals.give(*part)
        self.free |= set(range(part[0], part[0] + part[1]))

    @rule(start=st.integers(-2, SIZE), length=st.integers(0, 5))
    def give_what_is_free_or_outside(self, start: int, length: int) -> None:
        units = set(range(start, start + length))
        if length < 1 or units & self.free or not units <= set(range(SIZE)):
            with pytest.raises(MemoryStateError):
                self.intervals.give(start, length)

    @invariant()
    def agrees(self) -> None:
        self.intervals.check()
        assert {unit for start, length in self.intervals for unit in range(start, start + length)} == self.free
        assert self.intervals.free == len(self.free)

    def _taken(self, start: int, length: int) -> tuple[int, int]:
        units = set(range(start, start + length))
        assert units <= self.free
        self.free -= units
        return start, length


TestIntervals = IntervalsMachine.TestCase
TestIntervals.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_shortest_range_that_fits_is_taken() -> None:
    intervals = FreeIntervals(30)
    assert [intervals.take(10) for _ in range(3)] == [0, 10, 20]
    intervals.give(0, 10)
    intervals.give(20, 5)
    assert intervals.take(5) == 20


def test_neighbours_merge_on_both_sides() -> None:
    intervals = FreeIntervals(30)
    for _ in range(3):
        intervals.take(10)
    for start in (0, 20, 10):
        intervals.give(start, 10)
    assert list(intervals) == [(0, 30)]
