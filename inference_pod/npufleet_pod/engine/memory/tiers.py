"""The tiers below the device: slots of host memory, and a worker that moves pages between them and a slower store. Imports no torch.

Nothing here waits: the worker's thread reads and writes, the scheduler's thread asks what has ended. A page that cannot be moved is lost
and computed again; a tier that fails is left alone for a while.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from npufleet_pod.engine.memory.disk import PageStore
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError, TierError

MAX_QUEUED_MOVES = 64
"""Moves that may wait; beyond them a page is dropped rather than queued, so that a slow disk cannot hold host memory."""


@dataclass(frozen=True, slots=True)
class Move:
    """A page on its way between a host slot and the store."""

    number: int
    digest: bytes
    host_slot: int
    to_disk: bool


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that has ended; `error` says why it failed."""

    move: Move
    error: TierError | None


class Worker(Protocol):
    """Runs moves one after the other."""

    def submit(self, move: Move, run: Callable[[], None]) -> bool:
        """Take a move; False if too many wait."""
        ...

    def ended(self) -> list[Moved]:
        """Moves that ended since the last call."""
        ...


class InlineWorker:
    """Runs each move at once, in the caller's thread: for replays and tests."""

    def __init__(self) -> None:
        self._ended: list[Moved] = []

    def submit(self, move: Move, run: Callable[[], None]) -> bool:
        """See Worker."""
        self._ended.append(_run(move, run))
        return True

    def ended(self) -> list[Moved]:
        """See Worker."""
        ended, self._ended = self._ended, []
        return ended


class ThreadWorker:
    """Runs moves in a thread of its own until `close`."""

    def __init__(self, max_queued: int = MAX_QUEUED_MOVES) -> None:
        self._moves: queue.Queue[tuple[Move, Callable[[], None]] | None] = queue.Queue(max_queued)
        self._ended: queue.SimpleQueue[Moved] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-tiers")
        self._thread.start()

    def submit(self, move: Move, run: Callable[[], None]) -> bool:
        """See Worker."""
        try:
            self._moves.put_nowait((move, run))
        except queue.Full:
            return False
        return True

    def ended(self) -> list[Moved]:
        """See Worker."""
        ended = []
        while True:
            try:
                ended.append(self._ended.get_nowait())
            except queue.Empty:
                return ended

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._moves.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._moves.get()) is not None:
            self._ended.put(_run(*item))


def _run(move: Move, run: Callable[[], None]) -> Moved:
    try:
        run()
    except TierError as error:
        return Moved(move, error)
    except Exception as error:  # noqa: BLE001 - a store's defect costs its page, and is told; it must not end the thread and hang all moves
        return Moved(move, TierError(f"{type(error).__name__} in the KV store: {error}: the page is computed again"))
    return Moved(move, None)


class HostTier:
    """Slots of one page each in host memory.

    buffer: pinned and mapped by whoever owns the device; None keeps books without content. give_back: tells the host that bytes
    (start, size) of the buffer hold nothing (`HostRegion.give_back`); None where the memory is pinned and has to stay.
    """

    def __init__(
        self, slots: int, page_bytes: int, buffer: memoryview | None = None, give_back: Callable[[int, int], None] | None = None
    ) -> None:
        if slots < 1 or page_bytes < 1:
            raise LayoutError(f"host tier: {slots} slots of {page_bytes} bytes hold nothing: leave the tier out, or give it memory")
        if buffer is not None and len(buffer) < slots * page_bytes:
            raise LayoutError(f"host tier: {slots} slots of {page_bytes} bytes do not fit a buffer of {len(buffer)}: make it larger")
        self.slots = slots
        self.page_bytes = page_bytes
        self.buffer = buffer
        self._give_back = give_back
        self._free = list(range(slots))[::-1]
        self._is_free = [True] * slots
        self._withdrawn: list[int] = []

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def usable(self) -> int:
        """Slots that are not withdrawn."""
        return self.slots - len(self._withdrawn)

    def take(self) -> int | None:
        """A free slot, None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._is_free[slot] = False
        return slot

    def give(self, slot: int) -> None:
        """Free a slot. Raises MemoryStateError if it is free."""
        if self._is_free[slot]:
            raise MemoryStateError(f"host slot {slot} is freed twice")
        self._is_free[slot] = True
        self._free.append(slot)

    def withdraw(self, count: int) -> int:
        """Give the memory of up to `count` free slots back to the host, which is short of it; how many that were."""
        taken = [slot for slot in (self.take() for _ in range(min(count, len(self._free)))) if slot is not None]
        self._withdrawn += taken
        for slot in taken:
            if self._give_back is not None:
                self._give_back(slot * self.page_bytes, self.page_bytes)
        return len(taken)

    def restore(self, count: int) -> int:
        """Use up to `count` withdrawn slots again; how many that were."""
        back = [self._withdrawn.pop() for _ in range(min(count, len(self._withdrawn)))]
        for slot in back:
            self.give(slot)
        return len(back)

    def view(self, slot: int) -> memoryview:
        """A slot's bytes. Raises MemoryStateError without a buffer."""
        if self.buffer is None:
            raise MemoryStateError("this host tier keeps no content: give it a buffer")
        return self.buffer[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def held(self) -> set[int]:
        """Slots that are neither free nor withdrawn."""
        return {slot for slot, free in enumerate(self._is_free) if not free} - set(self._withdrawn)


class DiskTier:
    """A store of at most `pages` pages behind a worker. After a failed write it takes no page for `retry_seconds`."""

    def __init__(self, store: PageStore, worker: Worker, pages: int, clock: Callable[[], float], *, retry_seconds: float = 30) -> None:
        self.store = store
        self.pages = pages
        self._worker = worker
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._suspended_until: float | None = None
        self._numbers = 0

    @property
    def suspended(self) -> bool:
        """Whether a failure is so recent that nothing is written."""
        return self._suspended_until is not None and self._clock() < self._suspended_until

    def write(self, digest: bytes, host_slot: int, host: HostTier) -> Move | None:
        """Start to write a slot's content; None if too many moves wait, or the tier is suspended."""
        return None if self.suspended else self._start(digest, host_slot, host, to_disk=True)

    def read(self, digest: bytes, host_slot: int, host: HostTier) -> Move | None:
        """Start to read a page into a slot; None if too many moves wait."""
        return self._start(digest, host_slot, host, to_disk=False)

    def ended(self) -> list[Moved]:
        """Moves that ended since the last call."""
        moves = self._worker.ended()
        if any(moved.error is not None and moved.move.to_disk for moved in moves):
            self._suspended_until = self._clock() + self._retry_seconds
        return moves

    def _start(self, digest: bytes, host_slot: int, host: HostTier, *, to_disk: bool) -> Move | None:
        move = Move(self._numbers, digest, host_slot, to_disk)
        data = memoryview(b"") if host.buffer is None else host.view(host_slot)
        action = self.store.write if to_disk else self.store.read
        if not self._worker.submit(move, lambda: action(digest, data)):
            return None
        self._numbers += 1
        return move
