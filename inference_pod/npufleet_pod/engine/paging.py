"""Which pages of the KV cache a request holds. Nothing is shared between requests. Imports no torch.

Pages of a request that a step in flight uses are fenced when it is freed: they come back once the last such step has ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from npufleet_pod.errors import PodError


class MemoryStateError(PodError):
    """The bookkeeping of KV memory contradicts itself."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Tokens of a block, which is what is counted, and of a page, which is what is taken: whole blocks."""

    block_tokens: int
    page_tokens: int
    page_count: int

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Requests of different scopes never share KV."""

    adapter: str = ""
    salt: str = ""


class Room(Enum):
    """Whether memory was taken."""

    READY = auto()
    AFTER_STEP = auto()
    """Not yet: steps in flight use what will be free."""
    NONE = auto()


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where a sequence's tokens lie: page `pages[i]` holds those from `i * page_tokens` on."""

    pages: Sequence[int]

    def snapshot(self) -> PageTable:
        """The table as it is now, whatever is taken or given back later."""
        return PageTable(tuple(self.pages))


@dataclass(slots=True)
class _Fence:
    page: int
    steps: set[int]


@dataclass(slots=True)
class KVCacheManager:
    """Gives pages to requests. Not thread-safe."""

    layout: CacheLayout
    _free: set[int] = field(init=False)
    _lowest: list[int] = field(init=False)
    """A heap of free pages, and of some that are no longer free."""
    _held: dict[str, list[int]] = field(init=False, default_factory=dict)
    _steps: dict[int, frozenset[str]] = field(init=False, default_factory=dict)
    _fences: list[_Fence] = field(init=False, default_factory=list)
    _step_ids: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._free = set(range(self.layout.page_count))
        self._lowest = list(range(self.layout.page_count))

    @property
    def free_pages(self) -> int:
        """Pages that can be taken."""
        return len(self._free)

    @property
    def fenced_pages(self) -> int:
        """Pages that can be taken once steps in flight have ended."""
        return len(self._fences)

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return sum(len(pages) for pages in self._held.values()) / self.layout.page_count

    def admit(self, request_id: str, tokens: Sequence[int], scope: CacheScope) -> int:
        """Begin to keep pages of a request; returns how many of its tokens are there already: none."""
        self._held[request_id] = []
        return 0

    def reserve(self, request_id: str, tokens: int) -> Room:
        """Take pages until the request has room for `tokens`: all that it lacks, or none."""
        pages = self._held[request_id]
        lacking = self.layout.pages_for(tokens) - len(pages)
        if lacking > len(self._free):
            return Room.AFTER_STEP if lacking <= len(self._free) + len(self._fences) else Room.NONE
        for _ in range(lacking):
            # The page after the last one keeps the sequence in one piece.
            following = pages[-1] + 1 if pages else -1
            pages.append(self._take(following))
        return Room.READY

    def commit(self, request_id: str, tokens: Sequence[int]) -> None:
        """These tokens' KV is stored."""

    def free(self, request_id: str) -> None:
        """Give all pages of a request back; an unknown one is no error."""
        users = {number for number, request_ids in self._steps.items() if request_id in request_ids}
        for page in self._held.pop(request_id, []):
            if users:
                self._fences.append(_Fence(page, set(users)))
            else:
                self._give_back(page)

    def begin_step(self, request_ids: Sequence[str]) -> int:
        """A step uses the pages of these requests from now on; returns its number."""
        self._step_ids += 1
        self._steps[self._step_ids] = frozenset(request_ids)
        return self._step_ids

    def end_step(self, number: int) -> None:
        """The step has computed."""
        del self._steps[number]
        for fence in self._fences:
            fence.steps.discard(number)
        for fence in self._fences:
            if not fence.steps:
                self._give_back(fence.page)
        self._fences = [fence for fence in self._fences if fence.steps]

    def _take(self, wanted: int) -> int:
        """The page `wanted` if it is free, else the lowest that is."""
        page = wanted
        while page not in self._free:
            page = heapq.heappop(self._lowest)
        self._free.discard(page)
        return page

    def _give_back(self, page: int) -> None:
        self._free.add(page)
        heapq.heappush(self._lowest, page)

    def table(self, request_id: str) -> PageTable:
        """Where a request's tokens lie; it changes as pages are taken."""
        return PageTable(self._held[request_id])

    def check_integrity(self) -> None:
        """Raise MemoryStateError if a page was lost or is held twice."""
        pages = [*self._free, *(fence.page for fence in self._fences), *(page for held in self._held.values() for page in held)]
        if sorted(pages) != list(range(self.layout.page_count)):
            raise MemoryStateError(
                f"of {self.layout.page_count} KV pages, {len(pages)} are accounted for, {len(set(pages))} of them different"
            )
