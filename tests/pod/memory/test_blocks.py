"""Pages: who holds them, and the table of a sequence."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npufleet_pod.engine.memory.blocks import AscendBlockAllocator, HierarchicalBlockTable
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError
from npufleet_pod.engine.memory.layout import CacheLayout

PAGES = 24
LAYOUT = CacheLayout(16, 16, PAGES)


class AllocatorMachine(RuleBasedStateMachine):
    """Takes, shares, releases, retains and discards pages at random; the model is a list of holds and a set of retained pages."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = AscendBlockAllocator(LAYOUT)
        self.holds: list[int] = []
        self.retained: set[int] = set()

    @rule(count=st.integers(0, 8), expected=st.integers(0, PAGES), after=st.none() | st.integers(0, PAGES - 1))
    def allocate(self, count: int, expected: int, after: int | None) -> None:
        if count > self.allocator.free:
            with pytest.raises(MemoryStateError, match="evict before allocating"):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count, after=after, expected=expected)
        assert len(set(pages)) == count
        assert not set(pages) & (set(self.holds) | self.retained)
        self.holds += pages

    @precondition(lambda self: self.holds or self.retained)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.holds, *self.retained})))
        self.allocator.share(page)
        self.holds.append(page)
        self.retained.discard(page)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), retain=st.booleans())
    def release(self, data: st.DataObject, retain: bool) -> None:
        page = data.draw(st.sampled_from(self.holds))
        self.holds.remove(page)
        last = page not in self.holds
        assert self.allocator.release(page, retain=retain) == last
        if last and retain:
            self.retained.add(page)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.retained)))
        self.allocator.discard(page)
        self.retained.remove(page)

    @rule(page=st.integers(0, PAGES - 1))
    def misuse(self, page: int) -> None:
        if page not in self.holds:
            with pytest.raises(MemoryStateError):
                self.allocator.release(page, retain=False)
            if page not in self.retained:
                with pytest.raises(MemoryStateError):
                    self.allocator.share(page)
        if page not in self.retained:
            with pytest.raises(MemoryStateError):
                self.allocator.discard(page)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity(self.holds)
        assert self.allocator.held == len(set(self.holds))
        assert self.allocator.retained == len(self.retained)
        assert self.allocator.free == PAGES - len(set(self.holds) | self.retained)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_sequence_grows_behind_its_last_page() -> None:
    allocator = AscendBlockAllocator(LAYOUT)
    first = allocator.allocate(2, expected=10)
    allocator.allocate(2, expected=10)
    assert allocator.allocate(3, after=first[-1])[0] != first[-1] + 1, "the neighbour sits there"
    second = AscendBlockAllocator(LAYOUT)
    first = second.allocate(2)
    assert first + second.allocate(3, after=first[-1]) == [0, 1, 2, 3, 4]


def test_one_that_will_grow_is_put_where_it_can() -> None:
    allocator = AscendBlockAllocator(LAYOUT)
    pages = allocator.allocate(PAGES)
    for page in (*pages[:3], *pages[10:20]):
        allocator.release(page, retain=False)
    assert allocator.allocate(2) == [0, 1], "the tightest place"
    assert allocator.allocate(2, expected=8) == [10, 11]


def test_scattered_pages_come_in_few_runs_with_hints_for_all_but_the_first() -> None:
    allocator = AscendBlockAllocator(LAYOUT)
    pages = allocator.allocate(PAGES)
    for page in (*pages[0:2], *pages[5:9], *pages[12:15]):
        allocator.release(page, retain=False)
    table = HierarchicalBlockTable(LAYOUT)
    table.pages = allocator.allocate(8)
    assert table.runs() == [(5, 4), (12, 3), (0, 1)]
    assert table.prefetch_hints() == [(12, 3), (0, 1)]
    assert not table.contiguous


def test_integrity_names_the_page_that_is_counted_wrongly() -> None:
    allocator = AscendBlockAllocator(LAYOUT)
    allocator.allocate(3)
    with pytest.raises(MemoryStateError, match="page 2 is held 0 times and counted 1 times"):
        allocator.check_integrity([0, 1])


def test_a_table_maps_tokens_through_pages_to_blocks() -> None:
    table = HierarchicalBlockTable(CacheLayout(16, 64, 10))
    table.pages = [7, 2]
    assert table.capacity_tokens == 128
    assert list(table.blocks()) == [28, 29, 30, 31, 8, 9, 10, 11]
    assert table.slots(62, 4) == [7 * 64 + 62, 7 * 64 + 63, 2 * 64, 2 * 64 + 1]
    with pytest.raises(IndexError):
        table.slot(128)


@pytest.mark.parametrize(
    ("block_tokens", "page_tokens", "pages", "message"),
    [
        (8, 16, 1, "block_tokens: 8"),
        (24, 48, 1, "block_tokens: 24"),
        (144, 144, 1, "block_tokens: 144"),
        (32, 16, 1, "page_tokens: 16"),
        (32, 48, 1, "page_tokens: 48"),
        (16, 16, 0, "page_count: 0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(block_tokens: int, page_tokens: int, pages: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        CacheLayout(block_tokens, page_tokens, pages)
