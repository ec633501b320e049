"""One region of memory, taken once and handed out in aligned ranges. Imports no torch: what backs the region is the caller's choice."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError, OutOfMemoryError
from npufleet_pod.engine.memory.huge_pages import THIS_HOST, available_huge_page_bytes
from npufleet_pod.engine.memory.intervals import FreeIntervals
from npufleet_pod.engine.resources import Host

ALIGNMENT_BYTES = 128
"""Width of the Ascend memory bus; two cache lines of a CPU."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024
MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_HUGETLB = 0x40000
"""Linux's value on x86-64 and Arm; Python 3.11 has no name for it."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, start + size) of a pool's region; both are multiples of the alignment."""

    start: int
    size: int


class AscendMemoryPool:
    """Bookkeeping of one preallocated region: best fit, split on allocation, merged on free.

    Batches are taken as one contiguous range where there is one. Static buffers, for tensors whose size never changes, are laid out at
    the region's start once and never freed. Not thread-safe. Raises LayoutError for sizes below 1 and buffers that do not fit.
    """

    def __init__(
        self, capacity_bytes: int, *, alignment_bytes: int = ALIGNMENT_BYTES, static_buffers: Mapping[str, int] | None = None
    ) -> None:
        if alignment_bytes < 1 or alignment_bytes & (alignment_bytes - 1):
            raise LayoutError(f"alignment_bytes: {alignment_bytes} is not a power of two: choose one, such as {ALIGNMENT_BYTES}")
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes // alignment_bytes * alignment_bytes
        if self.capacity_bytes < alignment_bytes:
            raise LayoutError(f"capacity_bytes: {capacity_bytes} is less than one unit of {alignment_bytes} bytes: give the pool more")
        self._free = FreeIntervals(self.capacity_bytes // alignment_bytes)
        self._taken: dict[int, int] = {}
        self._static: dict[str, Range] = {}
        for name, size in (static_buffers or {}).items():
            try:
                self._static[name] = self.allocate(size)
            except OutOfMemoryError as error:
                raise LayoutError(f"static buffer {name}: {size} bytes do not fit the pool of {capacity_bytes}: give it more") from error

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, in whatever ranges."""
        return self._free.free * self.alignment_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest allocation that would succeed."""
        return self._free.largest * self.alignment_bytes

    @property
    def fragmentation_percent(self) -> float:
        """Share of the free bytes outside the largest free range, 0 to 100."""
        return 100 * (1 - self._free.largest / self._free.free) if self._free.free else 0.0

    def static(self, name: str) -> Range:
        """A buffer that was laid out at construction. Raises MemoryStateError for an unknown name."""
        try:
            return self._static[name]
        except KeyError:
            raise MemoryStateError(f"static buffer {name!r} was not laid out: name it when the pool is made") from None

    def allocate(self, size_bytes: int) -> Range:
        """Take one range of at least `size_bytes`. Raises OutOfMemoryError."""
        units = self._units(size_bytes)
        start = self._free.take(units)
        if start is None:
            raise OutOfMemoryError(
                f"{size_bytes} bytes were asked for, the longest free range has {self.largest_free_bytes} of {self.free_bytes} free bytes: "
                "free some, or make the pool larger"
            )
        return self._keep(start, units)

    def allocate_batch(self, sizes_bytes: Sequence[int]) -> list[Range]:
        """Take a range for each size, all or none, side by side where one free range holds them all. Raises OutOfMemoryError."""
        units = [self._units(size) for size in sizes_bytes]
        start = self._free.take(sum(units)) if units else None
        if start is not None:
            ranges = []
            for count in units:
                ranges.append(self._keep(start, count))
                start += count
            return ranges
        taken: dict[int, Range] = {}
        try:
            for index in sorted(range(len(units)), key=lambda index: -units[index]):
                taken[index] = self.allocate(units[index] * self.alignment_bytes)
        except OutOfMemoryError:
            for part in taken.values():
                self.free(part)
            raise
        return [taken[index] for index in range(len(units))]

    def free(self, part: Range) -> None:
        """Give a range back. Raises MemoryStateError if it is not held as it is, or is a static buffer."""
        start = part.start // self.alignment_bytes
        if self._taken.get(start) != part.size // self.alignment_bytes or part.start % self.alignment_bytes:
            raise MemoryStateError(f"{part} is not held: free each range once, as it was allocated")
        if part in self._static.values():
            raise MemoryStateError(f"{part} is a static buffer: these live as long as the pool")
        self._free.give(start, self._taken.pop(start))

    def check_integrity(self) -> None:
        """Raise MemoryStateError if a byte is lost, held twice, or both free and held."""
        self._free.check()
        end = 0
        for start, units in sorted([*self._free, *self._taken.items()]):
            if start != end:
                raise MemoryStateError(f"bytes from unit {end} to {start} are lost or held twice")
            end = start + units
        if end * self.alignment_bytes != self.capacity_bytes:
            raise MemoryStateError(f"the ranges end at unit {end}, the pool at byte {self.capacity_bytes}")

    def _keep(self, start: int, units: int) -> Range:
        self._taken[start] = units
        return Range(start * self.alignment_bytes, units * self.alignment_bytes)

    def _units(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise LayoutError(f"size: {size_bytes} bytes cannot be allocated: ask for at least 1")
        return -(-size_bytes // self.alignment_bytes)


class HostRegion:
    """Anonymous host memory that backs a pool: on reserved huge pages where the host has enough, else on transparent ones where it may.

    `huge_pages` says which: "reserved", "transparent" (the kernel was asked) or "none". Raises OutOfMemoryError.
    """

    def __init__(self, size_bytes: int, host: Host = THIS_HOST) -> None:
        if size_bytes < 1:
            raise LayoutError(f"size: {size_bytes} bytes cannot be mapped: ask for at least 1")
        self.size_bytes = size_bytes
        rounded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.huge_pages = "none"
        self._map = self._map_reserved(rounded, host) or self._map_plain(rounded)
        self.buffer: memoryview = memoryview(self._map)[:size_bytes]

    def _map_reserved(self, size: int, host: Host) -> mmap.mmap | None:
        # A pod that requests no huge pages has a cgroup limit of 0: the mapping succeeds there, and the first write kills the process.
        if available_huge_page_bytes(host) < size:
            return None
        try:
            region = mmap.mmap(-1, size, flags=MAP_FLAGS | MAP_HUGETLB)
        except OSError:
            # Another process took them since they were counted; plain pages serve as well, if slower.
            return None
        self.huge_pages = "reserved"
        return region

    def _map_plain(self, size: int) -> mmap.mmap:
        try:
            region = mmap.mmap(-1, size, flags=MAP_FLAGS)
        except OSError as error:
            raise OutOfMemoryError(
                f"the host gives no {size} bytes ({error.strerror}): lower the size or raise the memory limit"
            ) from error
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
            self.huge_pages = "transparent"
        except OSError:
            # Kernels without transparent huge pages refuse the advice; plain pages serve as well, if slower.
            self.huge_pages = "none"
        return region

    def give_back(self, start: int, size: int) -> None:
        """Let the host have the whole memory pages inside [start, start + size), whose content is lost; they come back when written."""
        page = HUGE_PAGE_BYTES if self.huge_pages == "reserved" else mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + size) // page * page
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Unmap. Raises BufferError while a tensor or view still uses the region."""
        self.buffer.release()
        self._map.close()

    def __enter__(self) -> HostRegion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
