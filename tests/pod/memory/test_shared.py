"""Memory that several processes map, and the counters in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from npufleet_pod.engine.distributed.progress import Progress
from npufleet_pod.engine.memory.errors import LayoutError, OutOfMemoryError
from npufleet_pod.engine.memory.shared import SharedRegion, create_shared

MIB = 2**20


@pytest.fixture
def descriptor() -> Iterator[int]:
    one = create_shared("npufleet-test")
    yield one
    os.close(one)


def held_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_what_one_mapping_writes_the_other_reads_and_given_back_memory_is_free(descriptor: int) -> None:
    ours, theirs = SharedRegion(descriptor, 4 * MIB), SharedRegion(descriptor, 4 * MIB)
    assert held_bytes(descriptor) == 0, "memory is taken when it is written"
    ours.buffer[:] = b"\x07" * (4 * MIB)
    assert theirs.buffer[3 * MIB] == 7
    assert held_bytes(descriptor) >= 4 * MIB
    theirs.give_back(MIB, MIB + 5)
    assert held_bytes(descriptor) <= 3 * MIB + 65536
    assert ours.buffer[MIB] == 0
    assert ours.buffer[MIB - 1] == ours.buffer[2 * MIB] == 7, "only whole pages inside the range are given back"
    for region in (ours, theirs):
        region.close()


def test_a_later_mapping_does_not_shrink_the_memory(descriptor: int) -> None:
    large = SharedRegion(descriptor, 2 * MIB)
    SharedRegion(descriptor, MIB).close()
    large.buffer[2 * MIB - 1] = 1
    large.close()


def test_a_size_that_cannot_be_mapped_is_told(descriptor: int) -> None:
    with pytest.raises(LayoutError, match="0 bytes cannot be mapped"):
        SharedRegion(descriptor, 0)
    with pytest.raises(OutOfMemoryError, match=r"bytes of shared memory: .*: lower the size"):
        SharedRegion(descriptor, 2**62)


def test_each_rank_moves_its_own_counter_and_all_see_it(descriptor: int) -> None:
    ranks = [Progress(descriptor, 3, rank) for rank in range(3)]
    for rank, progress in enumerate(ranks):
        for _ in range(rank * 2):
            progress.advance()
    assert {progress.counts() for progress in ranks} == {(0, 2, 4)}
