"""Host and disk: what moves, and what happens when it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from npufleet_pod.engine.memory.disk import HEADER, DiskStore
from npufleet_pod.engine.memory.errors import LayoutError, MemoryStateError, TierError
from npufleet_pod.engine.memory.layout import CacheLayout, Load, PrefixMatch, Room, Store
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.memory.pool import HostRegion
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier, InlineWorker, Move, ThreadWorker
from pod.memory.simulation import DeferredWorker, MemoryStore

DIGEST, OTHER = b"d" * 16, b"e" * 16
PAGE = memoryview(bytes(range(256)) * 4)


def prompt(number: int, pages: int = 4) -> list[int]:
    return [number * 100 + page for page in range(pages) for _ in range(16)] + [0]


def run(manager: KVCacheManager, tokens: list[int], name: str = "request") -> tuple[int, tuple[object, ...]]:
    """Serve a prompt: cached tokens, and the transfers of its step."""
    cached = manager.admit(name, tokens)
    assert manager.reserve(name, len(tokens) - 1) is Room.READY
    step = manager.begin_step([name])
    transfers = manager.take_transfers()
    manager.commit(name, tokens[cached:-1])
    manager.end_step(step)
    manager.free(name)
    manager.check_integrity()
    return cached, transfers


def test_a_page_that_is_evicted_from_the_device_comes_back_from_the_host() -> None:
    manager = KVCacheManager(CacheLayout(16, 16, 4), lambda: 0.0, host=HostTier(8, 128))
    run(manager, prompt(1))
    _, transfers = run(manager, prompt(2))
    assert [type(transfer) for transfer in transfers] == [Store] * 4
    assert manager.match(prompt(1)) == PrefixMatch(0, 64, 0)
    cached, transfers = run(manager, prompt(1))
    assert cached == 64
    assert sorted(type(transfer).__name__ for transfer in transfers) == ["Load"] * 4 + ["Store"] * 4
    stores = [index for index, transfer in enumerate(transfers) if isinstance(transfer, Store)]
    loads = [index for index, transfer in enumerate(transfers) if isinstance(transfer, Load)]
    assert max(stores) < min(loads), "a page is stored before another is loaded over it"


def test_a_slot_is_not_read_into_by_the_worker_until_the_load_from_it_has_run() -> None:
    store, worker = MemoryStore(), DeferredWorker()
    host = HostTier(2, 128, memoryview(bytearray(256)))
    manager = KVCacheManager(CacheLayout(16, 16, 2), lambda: 0.0, host=host, disk=DiskTier(store, worker, 8, lambda: 0.0))
    run(manager, prompt(1, 2))
    run(manager, prompt(2, 2))
    assert manager.match(prompt(1, 2)).host_tokens + manager.match(prompt(1, 2)).disk_tokens == 32
    worker.work()
    manager.prefetch([])
    manager.admit("loading", prompt(1, 1))
    taken = {transfer.host_slot for transfer in manager._residency._transfers if isinstance(transfer, Load)}
    free = {host.take() for _ in range(host.free)}
    assert taken
    assert not taken & free


def test_a_page_is_not_written_to_disk_before_its_store_has_run() -> None:
    worker = DeferredWorker()
    host = HostTier(2, 128, memoryview(bytearray(256)))
    manager = KVCacheManager(CacheLayout(16, 16, 2), lambda: 0.0, host=host, disk=DiskTier(MemoryStore(), worker, 8, lambda: 0.0))
    run(manager, prompt(1, 2))
    before = manager.begin_step([])
    manager.admit("next", prompt(2, 2))
    manager.reserve("next", 32)
    manager.end_step(before)
    assert not worker.queued, "the host's slots are taken, and empty"
    step = manager.begin_step(["next"])
    manager.end_step(step)
    assert worker.queued, "the host is full: a page is due"
    manager.check_integrity()


def test_a_page_that_is_needed_while_it_is_written_to_disk_leaves_neither_slot_nor_file() -> None:
    store, worker = MemoryStore(), DeferredWorker()
    host = HostTier(2, 128, memoryview(bytearray(256)))
    manager = KVCacheManager(CacheLayout(16, 16, 2), lambda: 0.0, host=host, disk=DiskTier(store, worker, 8, lambda: 0.0))
    run(manager, prompt(1, 2))
    run(manager, prompt(2, 2))
    slot = worker.queued[0][0].host_slot
    cached, _ = run(manager, prompt(1, 2))
    assert cached == 32
    assert slot in host.held(), "the worker still reads it"
    worker.work()
    assert store.pages
    run(manager, prompt(1, 2))
    run(manager, prompt(1, 2))
    assert slot not in host.held()
    assert not store.pages


def test_what_leaves_the_host_is_read_back_from_disk_before_it_is_needed() -> None:
    store = MemoryStore()
    host = HostTier(6, 128, memoryview(bytearray(6 * 128)))
    manager = KVCacheManager(CacheLayout(16, 16, 4), lambda: 0.0, host=host, disk=DiskTier(store, InlineWorker(), 20, lambda: 0.0))
    for number in range(4):
        run(manager, prompt(number))
    on_disk = [number for number in range(4) if manager.match(prompt(number)).disk_tokens]
    assert on_disk
    tokens = prompt(on_disk[0])
    before = manager.match(tokens)
    assert manager.prefetch(tokens) > 0
    assert manager.match(tokens).disk_tokens < before.disk_tokens


def test_a_disk_that_is_full_costs_nothing_but_its_hits() -> None:
    seconds = [0.0]
    store = MemoryStore()
    store.failing = True
    host = HostTier(3, 128, memoryview(bytearray(3 * 128)))
    disk = DiskTier(store, InlineWorker(), 20, lambda: seconds[0])
    manager = KVCacheManager(CacheLayout(16, 16, 2), lambda: seconds[0], host=host, disk=disk)
    for number in range(9):
        run(manager, prompt(number, 1))
    assert manager.residency_stats.failed_moves == 1, "after a failure the disk is left alone"
    assert disk.suspended
    seconds[0], store.failing = 31.0, False
    for number in range(10, 14):
        run(manager, prompt(number, 1))
    assert manager.residency_stats.spilled > 0


def test_a_page_that_fails_to_come_back_is_computed_again() -> None:
    store = MemoryStore()
    host = HostTier(6, 128, memoryview(bytearray(6 * 128)))
    manager = KVCacheManager(CacheLayout(16, 16, 4), lambda: 0.0, host=host, disk=DiskTier(store, InlineWorker(), 20, lambda: 0.0))
    for number in range(4):
        run(manager, prompt(number))
    lost = next(number for number in range(4) if manager.match(prompt(number)).disk_tokens)
    store.pages.clear()
    manager.prefetch(prompt(lost))
    assert manager.match(prompt(lost)).disk_tokens == 0
    run(manager, prompt(lost))
    assert manager.residency_stats.failed_moves > 0


def test_memory_that_the_host_needs_is_given_back_and_taken_again() -> None:
    with HostRegion(4 * 4096) as region:
        host = HostTier(4, 4096, region.buffer, region.give_back)
        manager = KVCacheManager(CacheLayout(16, 16, 4), lambda: 0.0, host=host)
        run(manager, prompt(1))
        run(manager, prompt(2))
        assert manager.shrink_host(3) == 3
        assert manager.match(prompt(1)).host_tokens <= 16
        run(manager, prompt(3))
        assert host.usable == 1
        assert manager.restore_host(9) == 3
        run(manager, prompt(4))
        manager.check_integrity()


def test_pages_survive_a_round_over_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.write(DIGEST, PAGE)
    back = bytearray(len(PAGE))
    store.read(DIGEST, memoryview(back))
    assert back == PAGE
    assert (tmp_path / f"{DIGEST.hex()}.kv").stat().st_mode & 0o777 == 0o600
    store.delete(DIGEST)
    store.delete(DIGEST)
    with pytest.raises(TierError, match="No such file"):
        store.read(DIGEST, memoryview(back))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: HEADER.size],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
)
def test_a_torn_file_is_told_and_removed(tmp_path: Path, damage: object) -> None:
    store = DiskStore(tmp_path)
    store.write(DIGEST, PAGE)
    path = tmp_path / f"{DIGEST.hex()}.kv"
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TierError, match="checksum"):
        store.read(DIGEST, memoryview(bytearray(len(PAGE))))
    assert not path.exists()


def test_a_file_under_another_pages_name_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.write(DIGEST, PAGE)
    (tmp_path / f"{DIGEST.hex()}.kv").rename(tmp_path / f"{OTHER.hex()}.kv")
    with pytest.raises(TierError, match="checksum"):
        store.read(OTHER, memoryview(bytearray(len(PAGE))))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # No file system of a test's own can be filled without mounting one: the call that would fail is replaced.
    monkeypatch.setattr("npufleet_pod.engine.memory.disk.os.write", full)
    with pytest.raises(TierError, match="No space left on device: free space there"):
        store.write(DIGEST, PAGE)
    assert list(tmp_path.iterdir()) == []


def test_what_another_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("aa.kv", "bb.tmp", "notes.txt"):
        (tmp_path / name).write_text("x")
    DiskStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierError, match="mount a writable volume"):
        DiskStore(tmp_path / "file" / "kv")


def test_the_workers_thread_runs_all_moves_and_survives_a_defect() -> None:
    worker = ThreadWorker()
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("defect")

    assert worker.submit(Move(0, DIGEST, 0, True), fail)
    assert worker.submit(Move(1, DIGEST, 0, True), lambda: ran.append(1))
    worker.close()
    first, second = worker.ended()
    assert "ValueError in the KV store: defect" in str(first.error)
    assert second.error is None
    assert ran == [1]


def test_a_worker_that_is_behind_takes_no_more() -> None:
    disk = DiskTier(MemoryStore(), DeferredWorker(max_queued=1), 8, lambda: 0.0)
    host = HostTier(2, 16)
    assert disk.write(DIGEST, 0, host) is not None
    assert disk.write(OTHER, 1, host) is None


def test_host_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="0 slots"):
        HostTier(0, 16)
    with pytest.raises(LayoutError, match="do not fit a buffer of 10"):
        HostTier(1, 16, memoryview(bytearray(10)))
    with pytest.raises(MemoryStateError, match="freed twice"):
        HostTier(1, 16).give(0)
