"""Which pages are free, held or kept for reuse, and the table that maps a sequence's tokens to its pages. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from npufleet_pod.engine.memory.access_pattern import PredictiveAccessPattern as PredictiveAccessPattern
from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.intervals import FreeIntervals
from npufleet_pod.engine.memory.layout import CacheLayout


class HierarchicalBlockTable:
    """Maps a sequence's tokens to memory on three levels: runs of adjacent pages, pages, and blocks in a page."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.pages: list[int] = []

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pages hold."""
        return len(self.pages) * self.layout.page_tokens

    @property
    def contiguous(self) -> bool:
        """Whether the pages are adjacent and in order, so that a kernel can read them as one range without a copy."""
        return all(after == before + 1 for before, after in pairwise(self.pages))

    def runs(self) -> list[tuple[int, int]]:
        """Ranges of adjacent pages, (first page, count), in the sequence's order."""
        runs: list[tuple[int, int]] = []
        for page in self.pages:
            if runs and runs[-1][0] + runs[-1][1] == page:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((page, 1))
        return runs

    def prefetch_hints(self) -> list[tuple[int, int]]:
        """Runs that the hardware's own prefetch will not see coming, in the order of use: all but the first."""
        return self.runs()[1:]

    def blocks(self) -> Iterator[int]:
        """Block numbers, page by page."""
        per_page = self.layout.blocks_per_page
        return (page * per_page + index for page in self.pages for index in range(per_page))

    def slot(self, token: int) -> int:
        """Slot of the sequence's token number `token`: page * page_tokens + offset. Raises IndexError beyond the pages."""
        index, offset = divmod(token, self.layout.page_tokens)
        return self.pages[index] * self.layout.page_tokens + offset

    def slots(self, start: int, count: int) -> list[int]:
        """Slots of tokens [start, start + count)."""
        return [self.slot(token) for token in range(start, start + count)]


class AscendBlockAllocator:
    """Hands out pages: adjacent ones first, in as few runs as there are where they are scattered. Counts who holds them.

    A page is free, held (by one or more), or retained: held by nobody, but its content may be used again.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._free = FreeIntervals(layout.page_count)
        self._references: dict[int, int] = {}
        self._retained: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self._free.free

    @property
    def retained(self) -> int:
        """Pages that nobody holds and whose content is kept."""
        return len(self._retained)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return len(self._references)

    def references(self, page: int) -> int:
        """How many hold `page`."""
        return self._references.get(page, 0)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        """Take `count` free pages, each held once. Raises MemoryStateError if fewer are free: make room first.

        after: the sequence's last page, behind which they should lie. expected: pages that the sequence may come to need, so that it is
        put where it can grow.
        """
        if count > self._free.free:
            raise MemoryStateError(f"{count} pages were asked for, {self._free.free} are free: evict before allocating")
        pages: list[int] = []
        if after is not None:
            adjacent = min(count, self._free.length_at(after + 1))
            if adjacent:
                self._free.take_at(after + 1, adjacent)
                pages += range(after + 1, after + 1 + adjacent)
        rest = count - len(pages)
        if rest:
            start = self._free.take(rest, max(expected, rest))
            if start is not None:
                pages += range(start, start + rest)
        while len(pages) < count:
            part = self._free.take_longest(count - len(pages))
            if part is None:
                raise MemoryStateError(f"{count - len(pages)} of {count} pages are free by count, and in no range")
            pages += range(part[0], part[0] + part[1])
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Hold a page that is held or retained. Raises MemoryStateError if it is free."""
        if page in self._references:
            self._references[page] += 1
        elif page in self._retained:
            self._retained.remove(page)
            self._references[page] = 1
        else:
            raise MemoryStateError(f"page {page} is free: only a page with content can be shared")

    def release(self, page: int, *, retain: bool) -> bool:
        """Let go of a page; once nobody holds it, it is retained or free. Returns whether that is so. Raises MemoryStateError."""
        references = self._references.get(page, 0)
        if references < 1:
            raise MemoryStateError(f"page {page} is released more often than it was taken")
        if references > 1:
            self._references[page] = references - 1
            return False
        del self._references[page]
        if retain:
            self._retained.add(page)
        else:
            self._free.give(page, 1)
        return True

    def discard(self, page: int) -> None:
        """Free a retained page. Raises MemoryStateError if it is not retained."""
        if page not in self._retained:
            raise MemoryStateError(f"page {page} is not retained: it is held or free")
        self._retained.remove(page)
        self._free.give(page, 1)

    def check_integrity(self, holders: Sequence[int] | None = None) -> None:
        """Raise MemoryStateError if a page is lost or in two states, or, given every holder's pages, if the counts differ from them."""
        self._free.check()
        free = {page for start, length in self._free for page in range(start, start + length)}
        states = (free, set(self._references), self._retained)
        if sum(map(len, states)) != self.layout.page_count or len(set().union(*states)) != self.layout.page_count:
            raise MemoryStateError(
                f"{len(free)} free, {len(self._references)} held and {len(self._retained)} retained pages are not "
                f"the {self.layout.page_count} that there are, each once"
            )
        if holders is not None:
            counts: dict[int, int] = {}
            for page in holders:
                counts[page] = counts.get(page, 0) + 1
            if counts != self._references:
                wrong = min(page for page in counts.keys() | self._references.keys() if counts.get(page) != self._references.get(page))
                raise MemoryStateError(
                    f"page {wrong} is held {counts.get(wrong, 0)} times and counted {self._references.get(wrong, 0)} times"
                )
