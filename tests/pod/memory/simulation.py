"""A device, a host and a disk made of numbers: what a page holds can be compared with what a request should find there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from npufleet_pod.engine.memory.errors import TierError
from npufleet_pod.engine.memory.layout import CacheLayout, CacheScope, Copy, Load, Store, Transfer
from npufleet_pod.engine.memory.tiers import Move, Moved

NUMBER_BYTES = 8


def kv_of(scope: CacheScope, tokens: Sequence[int], position: int) -> int:
    """The KV of a token: it depends on the scope and on all tokens up to it."""
    return hash((scope.adapter, scope.salt, *tokens[: position + 1])) & (2**63 - 1)


@dataclass
class SimulatedMemory:
    """Runs transfers and writes."""

    layout: CacheLayout
    host: bytearray
    device: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.device = [-1] * (self.layout.page_count * self.layout.page_tokens)

    @property
    def page_bytes(self) -> int:
        return self.layout.page_tokens * NUMBER_BYTES

    def execute(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            match transfer:
                case Copy(source, target, tokens):
                    self._page(target, self._page(source)[:tokens])
                case Store(page, slot):
                    data = b"".join(number.to_bytes(NUMBER_BYTES, "little", signed=True) for number in self._page(page))
                    self.host[slot * self.page_bytes : (slot + 1) * self.page_bytes] = data
                case Load(slot, page):
                    data = bytes(self.host[slot * self.page_bytes : (slot + 1) * self.page_bytes])
                    numbers = [
                        int.from_bytes(data[start : start + NUMBER_BYTES], "little", signed=True)
                        for start in range(0, len(data), NUMBER_BYTES)
                    ]
                    self._page(page, numbers)

    def _page(self, page: int, new: Sequence[int] | None = None) -> list[int]:
        start = page * self.layout.page_tokens
        if new is not None:
            self.device[start : start + len(new)] = new
        return self.device[start : start + self.layout.page_tokens]


class MemoryStore:
    """A disk that fails when told to."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.failing = False

    def write(self, digest: bytes, data: memoryview) -> None:
        if self.failing:
            raise TierError("no space")
        self.pages[digest] = bytes(data)

    def read(self, digest: bytes, into: memoryview) -> None:
        if self.failing or digest not in self.pages:
            raise TierError("torn")
        into[:] = self.pages[digest]

    def delete(self, digest: bytes) -> None:
        self.pages.pop(digest, None)


class DeferredWorker:
    """Runs a move when told to."""

    def __init__(self, max_queued: int = 4) -> None:
        self.queued: deque[tuple[Move, Callable[[], None]]] = deque()
        self._max_queued = max_queued
        self._ended: list[Moved] = []

    def submit(self, move: Move, run: Callable[[], None]) -> bool:
        if len(self.queued) >= self._max_queued:
            return False
        self.queued.append((move, run))
        return True

    def work(self) -> None:
        if self.queued:
            move, run = self.queued.popleft()
            try:
                run()
            except TierError as error:
                self._ended.append(Moved(move, error))
            else:
                self._ended.append(Moved(move, None))

    def ended(self) -> list[Moved]:
        ended, self._ended = self._ended, []
        return ended
