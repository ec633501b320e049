"""`fetch_model`: from settings to a published model that the engine's link points at."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from npufleet_api.fetching import FetchOutcome, FetchPhase, FetchSettings
from npufleet_api.sources import is_pinned, known_uri
from npufleet_fetch.cache import Cache, Manifest, Published, cache_key, link
from npufleet_fetch.errors import FetchError, SourceCorruptError
from npufleet_fetch.files import Listing, RemoteFile
from npufleet_fetch.meter import Meter
from npufleet_fetch.opening import open_source
from npufleet_fetch.selection import select_files
from npufleet_fetch.sources.base import Source
from npufleet_fetch.transfer import Pause, Transfer, with_attempts

logger = logging.getLogger(__name__)

LOCK_POLL_SECONDS = 0.5
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Folders of a fetch."""

    cache: Path
    credentials: Path
    link: Path | None
    """What the engine opens; None only fills the cache."""


async def fetch_model(
    settings: FetchSettings,
    pin: str,
    places: Places,
    meter: Meter,
    *,
    pause: Pause = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> FetchOutcome:
    """Fetch the model unless the cache has it. `pin`: revision that other replicas resolved, or empty. Raises FetchError."""
    started = clock()
    cache, key = Cache(places.cache), cache_key(settings)
    await asyncio.to_thread(cache.prepare)
    known = pin or _commit(settings)
    published = await asyncio.to_thread(cache.find, key, known) if known else None
    if published is None:
        source = open_source(settings, known, places.credentials)
        try:
            listing = await with_attempts(source.list, pause)
            if pin and listing.revision != pin:
                raise SourceCorruptError(
                    f"model.uri: the source has changed since the first replica fetched it ({pin} then, {listing.revision} now): upload "
                    "models under a path or revision of their own, and change model.uri or model.revision to move on"
                )
            published = await _bring(settings, cache, key, source, listing, meter, pause)
        finally:
            await source.close()
    _check_digest(settings, published.manifest)
    if places.link is not None:
        await asyncio.to_thread(link, published, places.link)
    meter.enter(FetchPhase.DONE)
    manifest = published.manifest
    return FetchOutcome(
        revision=manifest.revision,
        digest=manifest.digest,
        files=len(manifest.files),
        bytes=manifest.bytes,
        bytes_fetched=meter.fetched,
        seconds=round(clock() - started, 3),
    )


def _commit(settings: FetchSettings) -> str:
    """The revision, where it can only ever name one content."""
    uri = known_uri(settings.uri)
    return settings.revision or "" if uri is not None and is_pinned(uri, settings.revision, None) else ""


async def _bring(
    settings: FetchSettings, cache: Cache, key: str, source: Source, listing: Listing, meter: Meter, pause: Pause
) -> Published:
    """One pod of a node fetches, the others wait for it and find the model published."""
    files = select_files(listing.files, settings.files, allow_pickle=settings.allow_pickle)
    staging = cache.staging(key, listing.revision)
    meter.total = sum(file.size for file in files)
    while True:
        with cache.lock(staging.name) as alone:
            if alone:
                found = await asyncio.to_thread(cache.find, key, listing.revision)
                return found or await _download(settings, cache, key, source, listing.revision, files, staging, meter, pause)
        meter.enter(FetchPhase.WAITING)
        await asyncio.sleep(LOCK_POLL_SECONDS)


async def _download(
    settings: FetchSettings,
    cache: Cache,
    key: str,
    source: Source,
    revision: str,
    files: tuple[RemoteFile, ...],
    staging: Path,
    meter: Meter,
    pause: Pause,
) -> Published:
    meter.enter(FetchPhase.DOWNLOADING)
    limit = None if settings.size_limit_mi is None else settings.size_limit_mi * MIB
    linked = await asyncio.to_thread(cache.reuse, key, staging, files)
    meter.done = sum(file.size for file in files if file.path in linked)
    evicted = await asyncio.to_thread(cache.make_room, staging, meter.total - meter.done, limit)
    if evicted:
        logger.info("evicted", extra={"models": list(evicted)})
    transfer = Transfer(source, staging, meter, connections=settings.connections, part_bytes=settings.part_mi * MIB, pause=pause)
    sums = linked | await transfer.fetch([file for file in files if file.path not in linked])
    meter.enter(FetchPhase.CHECKING)
    manifest = await asyncio.to_thread(cache.manifest_of, staging, settings.uri, revision, sums)
    _check_digest(settings, manifest)
    return await asyncio.to_thread(cache.publish, key, staging, manifest)


def _check_digest(settings: FetchSettings, manifest: Manifest) -> None:
    if settings.digest is not None and manifest.digest != settings.digest:
        raise SourceCorruptError(
            f"model.digest: the files' digest is {manifest.digest}, the spec pins {settings.digest}: correct one, or find out who changed "
            "the files"
        )


def refused(error: FetchError) -> FetchOutcome:
    """The outcome that tells of `error`."""
    return FetchOutcome(reason=error.reason, message=" ".join(str(error).split())[:2000])
