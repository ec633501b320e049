"""The cache: what is published is whole, what is in use stays, and what a disk does wrong is said."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetch.conftest import WEIGHTS, Fetch, small_model
from npufleet_api.fetching import IN_USE_FILE
from npufleet_fetch.cache import Cache
from npufleet_fetch.errors import CacheFullError, CacheUnavailableError
from npufleet_fetch.eviction import GRACE_SECONDS, Held, choose_victims
from npufleet_pod.errors import ModelError
from npufleet_pod.model_hold import hold_model
from support.hub_server import Hub

root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems of its own")
LONG_AGO = 1_000_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def age(cache: Path) -> None:
    """As if every model in it had last been used long ago."""
    for mark in cache.rglob(IN_USE_FILE):
        os.utime(mark, (LONG_AGO, LONG_AGO))


def models(cache: Path) -> set[str]:
    """Revisions in the cache."""
    return {path.name for path in cache.glob("v1/models/*/*")}


@root
async def test_a_full_disk_is_a_reason_of_its_own(fetch: Fetch, small_disk: Path) -> None:
    with pytest.raises(CacheFullError, match=r"the model needs \d+ MiB, the cache has no limit and \d+ MiB of free disk"):
        await fetch(cache=small_disk)


@root
async def test_a_disk_that_fills_up_meanwhile_is_told_too(fetch: Fetch, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another pod takes the room after it was found free.
    monkeypatch.setattr(Cache, "make_room", lambda *_: ())
    with pytest.raises(CacheFullError, match=r"No space left on device: free disk space, or lower spec\.models\.cache\.sizeLimitGi"):
        await fetch(cache=small_disk)


@root
async def test_a_disk_that_is_read_only_is_a_reason_of_its_own(fetch: Fetch, small_disk: Path) -> None:
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CacheUnavailableError, match=r"Read-only file system: mount it for writing"):
        await fetch(cache=small_disk)


async def test_a_limit_evicts_the_longest_unused_model_and_no_other(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for letter in "bcd":
        hub.commit_files(letter * 40, small_model(ord(letter)))
        await fetch(size_limit_mi=10)
        age(cache) if letter == "b" else None
    assert models(cache) == {letter * 40 for letter in "bcd"}
    for mark in cache.rglob(IN_USE_FILE):
        os.utime(mark, (LONG_AGO + "bcd".index(mark.parent.name[0]),) * 2)
    hub.commit_files("e" * 40, small_model(9))
    await fetch(size_limit_mi=10)
    assert models(cache) == {letter * 40 for letter in "cde"}


async def test_a_model_that_an_engine_holds_is_never_evicted(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    await fetch(size_limit_mi=4)
    age(cache)
    hub.commit_files("b" * 40, small_model(1))
    with hold_model(tmp_path / "models" / "current"), pytest.raises(CacheFullError, match="models in use stay"):
        await fetch(size_limit_mi=4)
    assert models(cache) == {"a" * 40}
    await fetch(size_limit_mi=4)
    assert models(cache) == {"b" * 40}


async def test_a_model_that_was_used_a_moment_ago_is_not_evicted(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    await fetch(size_limit_mi=4)
    hub.commit_files("b" * 40, small_model(1))
    with pytest.raises(CacheFullError):
        await fetch(size_limit_mi=4)
    assert models(tmp_path / "cache") == {"a" * 40}


async def test_what_a_killed_fetch_left_is_evicted_too(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "v1" / "partial" / "hf-left@behind" / "files"
    left.mkdir(parents=True)
    (left / WEIGHTS).write_bytes(b"x" * (2 << 20))
    os.utime(left.parent, (LONG_AGO, LONG_AGO))
    await fetch(size_limit_mi=4)
    assert not left.parent.exists()


async def test_a_file_that_was_damaged_is_fetched_again(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    await fetch(revision=hub.commit)
    weights = (tmp_path / "models" / "current" / WEIGHTS).resolve()
    damaged = bytearray(weights.read_bytes())
    damaged[1000] ^= 1
    weights.write_bytes(damaged)
    await fetch(revision=hub.commit)
    assert (tmp_path / "models" / "current" / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


async def test_verify_finds_what_keeps_its_size_and_time(fetch: Fetch, tmp_path: Path) -> None:
    await fetch()
    cache = Cache(tmp_path / "cache")
    assert [wrong for _, wrong in cache.verify()] == [""]
    weights = (tmp_path / "models" / "current" / WEIGHTS).resolve()
    found = weights.stat()
    weights.write_bytes(b"\0" * found.st_size)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert [wrong for _, wrong in cache.verify()] == [WEIGHTS]


async def test_what_was_fetched_with_credentials_is_not_found_from_another_namespace(fetch: Fetch, hub: Hub) -> None:
    await fetch(scope="team-a")
    seen = len(hub.requests)
    await fetch(hub.commit, scope="team-b")
    assert len(hub.requests) > seen


def test_an_engine_holds_its_model_while_it_serves(tmp_path: Path) -> None:
    (tmp_path / IN_USE_FILE).touch()
    with hold_model(tmp_path), (tmp_path / IN_USE_FILE).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / IN_USE_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_engine_whose_model_was_evicted_says_so(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="delete the pod, so that it is fetched again"), hold_model(tmp_path / "current"):
        pass


held = st.builds(
    Held,
    name=st.text("abcdef", min_size=1, max_size=4),
    bytes=st.integers(0, 100),
    used=st.floats(0, 2 * GRACE_SECONDS, allow_nan=False),
    busy=st.booleans(),
)


@given(st.lists(held, max_size=8, unique_by=lambda h: h.name), st.integers(0, 300), st.none() | st.integers(1, 300), st.integers(0, 300))
def test_evicting_makes_room_and_never_touches_what_is_used(models: list[Held], need: int, limit: int | None, free: int) -> None:
    now = 2 * GRACE_SECONDS
    may_go = sum(m.bytes for m in models if not m.busy and now - m.used >= GRACE_SECONDS)
    try:
        victims = choose_victims(models, need, limit, free, now)
    except CacheFullError:
        left = sum(m.bytes for m in models) - may_go
        assert free + may_go < need or (limit is not None and left + need > limit)
        return
    assert not any(victim.busy or now - victim.used < GRACE_SECONDS for victim in victims)
    gone = sum(victim.bytes for victim in victims)
    assert free + gone >= need
    if limit is not None:
        assert sum(m.bytes for m in models) - gone + need <= limit
    kept = [m.used for m in models if m not in victims and not m.busy and now - m.used >= GRACE_SECONDS]
    assert not victims or not kept or max(v.used for v in victims) <= min(kept)
