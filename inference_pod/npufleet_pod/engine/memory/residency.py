"""Where cached pages live: what is evicted for whom, what moves between device, host and disk. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_pod.engine.memory.access_pattern import TIERS, PredictiveAccessPattern, Tier
from npufleet_pod.engine.memory.blocks import AscendBlockAllocator
from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.layout import Copy, Load, Store, Transfer
from npufleet_pod.engine.memory.prefix_cache import CachedPage, PrefixCache
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier, Move

logger = logging.getLogger(__name__)

SPARE_HOST_SHARE = 1 / 16
"""Host slots kept free at least, by writing to disk ahead of need: a write takes longer than a step can wait."""
MAX_SPARE_HOST_SHARE = 1 / 2
BURST_MEMORY = 0.995
"""By how much the largest number of slots that one step took fades with each step; twice as many are kept free."""


@dataclass(slots=True)
class ResidencyStats:
    """Pages, counted since the start."""

    evicted: int = 0
    """Dropped from the device, or from all tiers."""
    stored: int = 0
    loaded: int = 0
    spilled: int = 0
    fetched: int = 0
    failed_moves: int = 0


@dataclass(frozen=True, slots=True)
class TransferBatch:
    """Transfers that run, in order, before one step, and what has to wait until that step has ended."""

    transfers: tuple[Transfer, ...]
    stored: tuple[tuple[CachedPage, int], ...]
    """Pages with the host slots that will hold them."""
    freed_slots: tuple[int, ...]
    """Slots that are read until then."""


class Residency:
    """Moves cached pages. A page that somebody holds is on the device, as is all of its prefix, and stays.

    Transfers run in the order in which they are queued, before the step that takes them, so pages of the device can be used again at once.
    What a worker touches is outside that order: a slot reaches it only when the transfers that use the slot have ended.
    """

    def __init__(
        self,
        allocator: AscendBlockAllocator,
        cache: PrefixCache,
        pattern: PredictiveAccessPattern,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self._allocator = allocator
        self._cache = cache
        self._pattern = pattern
        self._host = host
        self._disk = disk if host is not None else None
        self._on_disk = 0
        self._moves: dict[int, tuple[Move, CachedPage | None]] = {}
        """Moves of a worker; without a page where it went elsewhere in the meantime."""
        self._transfers: list[Transfer] = []
        self._unstored: set[CachedPage] = set()
        self._storing: list[tuple[CachedPage, int]] = []
        self._freed_slots: list[int] = []
        self._fenced_slots = 0
        self._burst = 0.0
        self._taken = 0
        self.stats = ResidencyStats()

    @property
    def moving(self) -> int:
        """Pages that a worker moves."""
        return len(self._moves)

    @property
    def on_disk(self) -> int:
        """Pages on disk."""
        return self._on_disk

    def hold(self, page: CachedPage) -> int:
        """Hold a cached page of the device; its number. Raises MemoryStateError if it is elsewhere."""
        if page.tier is not Tier.DEVICE or page.place is None:
            raise MemoryStateError(f"page {page.digest.hex()} is not on the device: load it first")
        self._pattern.remove(page.digest)
        self._allocator.share(page.place)
        return page.place

    def release(self, number: int) -> None:
        """Let go of a page of the device: its content stays, evictable, if it is cached."""
        page = self._cache.on_device(number)
        if self._allocator.release(number, retain=page is not None) and page is not None:
            self._pattern.add(page.digest, Tier.DEVICE)

    def reclaim(self, count: int) -> bool:
        """Evict until `count` pages of the device are free; False if held pages are in the way. What is worth least goes first."""
        if self._allocator.free + self._allocator.retained < count:
            return False
        while self._allocator.free < count:
            self._demote(self._victim(Tier.DEVICE))
        return True

    def load(self, pages: Sequence[CachedPage], after: int | None, expected: int) -> list[int]:
        """Bring as many of `pages`, all on the host, as there is room for to the device, and hold them; their numbers there."""
        for page in pages:
            self._pattern.remove(page.digest)
        count = min(len(pages), self._allocator.free + self._allocator.retained)
        self.reclaim(count)
        numbers = self._allocator.allocate(count, after=after, expected=expected)
        for page, number in zip(pages, numbers, strict=False):
            self._transfers.append(Load(_place(page), number))
            self._leave_host(page)
            self._cache.place(page, Tier.DEVICE, number)
        for page in pages[count:]:
            if not page.moving and page not in self._unstored:
                self._pattern.add(page.digest, Tier.HOST)
        self.stats.loaded += count
        return numbers

    def adopt(self, page: CachedPage, number: int) -> int:
        """`number`, held once, has the content of `page`: keep one of the two and say which. The caller lets the other go."""
        if page.tier is Tier.DEVICE and self._allocator.references(_place(page)):
            return self.hold(page)
        self._pattern.remove(page.digest)
        self._leave(page)
        self._cache.place(page, Tier.DEVICE, number)
        return number

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Queue a copy of a page's first tokens within the device."""
        self._transfers.append(Copy(source, target, tokens))

    def take_batch(self) -> TransferBatch:
        """What is queued, for the next step; its end is told by `finish`."""
        batch = TransferBatch(tuple(self._transfers), tuple(self._storing), tuple(self._freed_slots))
        self._fenced_slots += len(batch.freed_slots)
        self._transfers.clear()
        self._storing.clear()
        self._freed_slots.clear()
        return batch

    def finish(self, batch: TransferBatch) -> None:
        """The step that ran a batch has ended."""
        if self._host is None:
            return
        self._burst = max(self._burst * BURST_MEMORY, self._taken)
        self._taken = 0
        for page, slot in batch.stored:
            if page in self._unstored and page.tier is Tier.HOST and page.place == slot:
                self._unstored.remove(page)
                self._pattern.add(page.digest, Tier.HOST)
        for slot in batch.freed_slots:
            self._host.give(slot)
        self._fenced_slots -= len(batch.freed_slots)
        self.poll()
        self._spill_ahead()

    def fetch(self, pages: Sequence[CachedPage]) -> int:
        """Start to read pages from disk to the host, in order, as long as there are slots; how many are on the way."""
        if self._host is None or self._disk is None:
            return 0
        on_the_way = 0
        for page in pages:
            if not page.moving:
                slot = self._host.take()
                if slot is None:
                    break
                if not self._start(page, slot, self._disk.read(page.digest, slot, self._host)):
                    self._host.give(slot)
                    break
                self._taken += 1
            on_the_way += 1
        self.poll()
        return on_the_way

    def poll(self) -> None:
        """Account for the moves that ended."""
        if self._host is None or self._disk is None:
            return
        for moved in self._disk.ended():
            move, page = self._moves.pop(moved.move.number)
            if moved.error is not None:
                self.stats.failed_moves += 1
                logger.warning("a page of KV was not moved", extra={"to_disk": move.to_disk, "reason": str(moved.error)})
            if page is not None:
                page.moving = False
            if move.to_disk:
                self._written(move, page, failed=moved.error is not None)
            else:
                self._read(move, page, failed=moved.error is not None)

    def shrink_host(self, slots: int) -> int:
        """Give up to `slots` slots' memory back to a host that is short of it, dropping what is worth least; how many that were."""
        if self._host is None:
            return 0
        while self._host.free < slots and self._pattern.evictable(Tier.HOST):
            self._drop(self._victim(Tier.HOST), fence=False)
        return self._host.withdraw(slots)

    def restore_host(self, slots: int) -> int:
        """Use up to `slots` slots again that were given back; how many that were."""
        return 0 if self._host is None else self._host.restore(slots)

    def check_integrity(self) -> None:
        """Raise MemoryStateError if a page, slot or file is lost or in two states."""
        self._cache.check_integrity()
        slots: list[int] = [*self._freed_slots]
        files = 0
        evictable = [0] * len(TIERS)
        for page in self._cache:
            parent = page.parent
            if page.tier is Tier.DEVICE:
                references = self._allocator.references(_place(page))
                evictable[Tier.DEVICE] += references == 0
                in_memory = parent is None or parent.parent is None or parent.tier is Tier.DEVICE
                held = parent is None or parent.place is None or references == 0 or self._allocator.references(parent.place) > 0
                if not in_memory or not held:
                    raise MemoryStateError(f"page {page.digest.hex()} is on the device, or held, without its prefix")
            elif page.tier is Tier.HOST:
                slots.append(_place(page))
                evictable[Tier.HOST] += not page.moving and page not in self._unstored
            elif page.tier is Tier.DISK:
                files += 1
                evictable[Tier.DISK] += not page.moving
            else:
                raise MemoryStateError(f"page {page.digest.hex()} is cached nowhere")
        slots += [move.host_slot for move, page in self._moves.values() if page is None or page.tier is not Tier.HOST]
        counted = [self._pattern.evictable(tier) for tier in TIERS]
        if evictable != counted or evictable[Tier.DEVICE] != self._allocator.retained:
            raise MemoryStateError(
                f"{evictable} pages are evictable by tier, {counted} are ranked and {self._allocator.retained} retained on the device"
            )
        if files != self._on_disk:
            raise MemoryStateError(f"{files} pages are on disk, {self._on_disk} are counted")
        if self._host is not None and (len(set(slots)) != len(slots) or len(self._host.held()) != len(slots) + self._fenced_slots):
            raise MemoryStateError(
                f"{len(self._host.held())} host slots are taken, {len(slots)} hold pages, {self._fenced_slots} are fenced"
            )

    def _victim(self, tier: Tier) -> CachedPage:
        digest = self._pattern.victim(tier)
        if not isinstance(digest, bytes):
            raise MemoryStateError(f"no page of the {tier.name} is evictable, though there should be one")
        return self._cache.leaf(self._cache.get(digest))

    def _demote(self, page: CachedPage) -> None:
        slot = self._slot_for_store()
        if slot is None:
            self._drop(page)
            return
        number = _place(page)
        self._pattern.remove(page.digest)
        self._transfers.append(Store(number, slot))
        self._allocator.discard(number)
        self._cache.place(page, Tier.HOST, slot)
        self._unstored.add(page)
        self._storing.append((page, slot))
        self._taken += 1
        self.stats.stored += 1

    def _slot_for_store(self) -> int | None:
        """A free slot, or that of the host's least page: transfers are in order, so its content is read before it is overwritten."""
        if self._host is None:
            return None
        slot = self._host.take()
        if slot is None and self._pattern.evictable(Tier.HOST):
            self._drop(self._victim(Tier.HOST), fence=False)
            slot = self._host.take()
        return slot

    def _spill_ahead(self) -> None:
        if self._host is None or self._disk is None:
            return
        usable = self._host.usable
        wanted = max(1, usable * SPARE_HOST_SHARE, min(2 * self._burst, usable * MAX_SPARE_HOST_SHARE))
        writing = sum(move.to_disk for move, _ in self._moves.values())
        while self._host.free + writing < wanted and self._pattern.evictable(Tier.HOST):
            if self._on_disk >= self._disk.pages:
                if not self._pattern.evictable(Tier.DISK):
                    return
                self._drop(self._victim(Tier.DISK))
            page = self._victim(Tier.HOST)
            # An earlier move of the same content would end by deleting the file that this one writes.
            if page in self._unstored or any(move.digest == page.digest for move, _ in self._moves.values()):
                return
            if not self._start(page, _place(page), self._disk.write(page.digest, _place(page), self._host)):
                return
            writing += 1
        self.poll()

    def _start(self, page: CachedPage, slot: int, move: Move | None) -> bool:
        if move is None:
            return False
        self._pattern.remove(page.digest)
        page.moving = True
        self._moves[move.number] = (move, page)
        return True

    def _written(self, move: Move, page: CachedPage | None, *, failed: bool) -> None:
        if page is None:
            self._freed_slots.append(move.host_slot)
            if not failed:
                self._delete_file(move.digest)
        elif failed:
            self._pattern.add(page.digest, Tier.HOST)
        else:
            self._give_slot(move.host_slot)
            self._cache.place(page, Tier.DISK, None)
            self._on_disk += 1
            self._pattern.add(page.digest, Tier.DISK)
            self.stats.spilled += 1

    def _read(self, move: Move, page: CachedPage | None, *, failed: bool) -> None:
        if page is None or failed:
            self._give_slot(move.host_slot)
            if page is None:
                self._delete_file(move.digest)
            else:
                self._drop(page)
            return
        self._leave_disk(page)
        self._cache.place(page, Tier.HOST, move.host_slot)
        self._pattern.add(page.digest, Tier.HOST)
        self.stats.fetched += 1

    def _drop(self, page: CachedPage, *, fence: bool = True) -> None:
        """Forget a page and all that is of no use without it. Nobody holds any of it: who holds a page holds its prefix."""
        for each in self._cache.subtree(page):
            self._pattern.remove(each.digest)
            self._leave(each, fence=fence)
            self._cache.remove(each)
            self.stats.evicted += 1

    def _leave(self, page: CachedPage, *, fence: bool = True) -> None:
        if page.tier is Tier.DEVICE:
            self._allocator.discard(_place(page))
        elif page.tier is Tier.HOST:
            self._leave_host(page, fence=fence)
        elif page.tier is Tier.DISK:
            self._leave_disk(page)

    def _leave_host(self, page: CachedPage, *, fence: bool = True) -> None:
        self._unstored.discard(page)
        if page.moving:
            self._orphan(page)
        elif fence:
            self._freed_slots.append(_place(page))
        else:
            self._give_slot(_place(page))

    def _leave_disk(self, page: CachedPage) -> None:
        self._on_disk -= 1
        if page.moving:
            self._orphan(page)
        else:
            self._delete_file(page.digest)

    def _orphan(self, page: CachedPage) -> None:
        page.moving = False
        number = next(number for number, (_, moved) in self._moves.items() if moved is page)
        self._moves[number] = (self._moves[number][0], None)

    def _give_slot(self, slot: int) -> None:
        if self._host is not None:
            self._host.give(slot)

    def _delete_file(self, digest: bytes) -> None:
        if self._disk is not None:
            self._disk.store.delete(digest)


def _place(page: CachedPage) -> int:
    if page.place is None:
        raise MemoryStateError(f"page {page.digest.hex()} is in no place")
    return page.place
