"""The memory pool and the region behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError, OutOfMemoryError
from npufleet_pod.engine.memory.huge_pages import available_huge_page_bytes
from npufleet_pod.engine.memory.pool import ALIGNMENT_BYTES, AscendMemoryPool, HostRegion, Range
from npufleet_pod.engine.resources import Host

CAPACITY = 32 * ALIGNMENT_BYTES


class PoolMachine(RuleBasedStateMachine):
    """Allocates and frees at random, next to static buffers."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = AscendMemoryPool(CAPACITY, static_buffers={"slots": 100, "positions": 300})
        self.live = {self.pool.static("slots"), self.pool.static("positions")}

    @rule(target=held, size=st.integers(1, CAPACITY // 2))
    def allocate(self, size: int) -> object:
        fits = self.pool.largest_free_bytes >= size
        try:
            part = self.pool.allocate(size)
        except OutOfMemoryError:
            assert not fits
            return multiple()
        assert fits
        return self._taken(part, size)

    @rule(target=held, sizes=st.lists(st.integers(1, CAPACITY // 4), max_size=5))
    def allocate_batch(self, sizes: list[int]) -> object:
        free, largest = self.pool.free_bytes, self.pool.largest_free_bytes
        needed = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        try:
            parts = self.pool.allocate_batch(sizes)
        except OutOfMemoryError:
            assert self.pool.free_bytes == free, "a batch that does not fit takes nothing"
            assert needed > largest
            return multiple()
        if needed <= largest and parts:
            assert parts[-1].start + parts[-1].size - parts[0].start == needed, "a batch lies side by side where it can"
        return multiple(*[self._taken(part, size) for part, size in zip(parts, sizes, strict=True)])

    @rule(part=consumes(held))
    def free(self, part: Range) -> None:
        self.pool.free(part)
        self.live.remove(part)
        with pytest.raises(MemoryStateError):
            self.pool.free(part)

    @invariant()
    def nothing_is_lost_or_overlaps(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_bytes == CAPACITY - sum(part.size for part in self.live)

    def _taken(self, part: Range, size: int) -> Range:
        assert part.start % ALIGNMENT_BYTES == 0
        assert size <= part.size < size + ALIGNMENT_BYTES
        assert all(part.start >= other.start + other.size or other.start >= part.start + part.size for other in self.live)
        self.live.add(part)
        return part


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_static_buffers_stay() -> None:
    pool = AscendMemoryPool(CAPACITY, static_buffers={"slots": 100})
    with pytest.raises(MemoryStateError, match="static"):
        pool.free(pool.static("slots"))
    with pytest.raises(MemoryStateError, match="'tables' was not laid out"):
        pool.static("tables")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AscendMemoryPool(100), "capacity_bytes: 100"),
        (lambda: AscendMemoryPool(CAPACITY, alignment_bytes=100), "alignment_bytes: 100"),
        (lambda: AscendMemoryPool(CAPACITY, static_buffers={"slots": CAPACITY + 1}), "static buffer slots"),
        (lambda: AscendMemoryPool(CAPACITY).allocate(0), "size: 0"),
        (lambda: HostRegion(0), "size: 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError, match=message):
        make()


def test_what_does_not_fit_is_told_with_numbers() -> None:
    pool = AscendMemoryPool(4 * ALIGNMENT_BYTES)
    parts = pool.allocate_batch([128] * 4)
    pool.free(parts[0])
    pool.free(parts[2])
    with pytest.raises(OutOfMemoryError, match="256 bytes were asked for, the longest free range has 128 of 256 free bytes"):
        pool.allocate(256)
    assert pool.fragmentation_percent == 50


def test_a_batch_is_scattered_where_no_range_holds_it() -> None:
    pool = AscendMemoryPool(5 * ALIGNMENT_BYTES)
    parts = pool.allocate_batch([128] * 5)
    pool.free(parts[1])
    pool.free(parts[3])
    assert {part.start for part in pool.allocate_batch([128, 128])} == {128, 384}


def test_a_region_is_memory_that_can_be_given_back() -> None:
    with HostRegion(3 * 2**20) as region:
        assert region.huge_pages in ("reserved", "transparent", "none")
        region.buffer[:4] = b"kept"
        region.buffer[2**20 : 2**20 + 4] = b"gone"
        region.give_back(2**20 - 1, 2**20)
        assert bytes(region.buffer[:4]) == b"kept"
        if region.huge_pages != "reserved":
            assert bytes(region.buffer[2**20 : 2**20 + 4]) == bytes(4)


def test_a_region_that_is_still_viewed_cannot_be_closed() -> None:
    region = HostRegion(4096)
    view = region.buffer[:10]
    with pytest.raises(BufferError):
        region.close()
    view.release()
    region.close()


@pytest.mark.parametrize(
    ("files", "pages"),
    [
        ({}, 7),
        ({"hugetlb.2MB.max": "max"}, 7),
        ({"hugetlb.2MB.max": str(3 * 2**21), "hugetlb.2MB.current": str(2**21)}, 2),
        ({"hugetlb.2MB.max": "0"}, 0),
    ],
)
def test_reserved_huge_pages_are_counted_and_limited(tmp_path: Path, files: dict[str, str], pages: int) -> None:
    group = tmp_path / "group"
    group.mkdir()
    for name, text in files.items():
        (group / name).write_text(text)
    (tmp_path / "cgroup").write_text("0::/group\n")
    (tmp_path / "meminfo").write_text("HugePages_Total: 10\nHugePages_Free: 8\nHugePages_Rsvd: 1\nHugepagesize: 2048 kB\n")
    assert available_huge_page_bytes(Host(tmp_path, tmp_path / "cgroup", tmp_path / "meminfo")) == pages * 2**21


def test_huge_pages_of_another_size_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("HugePages_Free: 8\nHugepagesize: 1048576 kB\n")
    assert available_huge_page_bytes(Host(tmp_path, tmp_path / "cgroup", tmp_path / "meminfo")) == 0
