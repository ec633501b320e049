"""`Transfer`: brings a model's files into a staging folder, by parallel ranges, each tried again within bounds and checked at the end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from npufleet_fetch.checksums import Sums, sums_of
from npufleet_fetch.disk import meaning
from npufleet_fetch.errors import FetchError, NoRangesError, SourceCorruptError, SourceUnavailableError, TransientError
from npufleet_fetch.files import RemoteFile
from npufleet_fetch.meter import Meter
from npufleet_fetch.sources.base import Source
from npufleet_fetch.staging import Part, StagedFile

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]
ATTEMPTS = 6
"""In a row without progress: with FIRST_PAUSE_SECONDS doubled each time, about a minute; then the kubelet's own back-off takes over."""
FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 30.0
PROGRESS_BYTES = 1 << 20
"""So much of a range counts as progress: attempts are counted anew. A range has an end, so they are bounded."""
WRITE_BYTES = 4 << 20
CHECKS_AT_ONCE = 2


class _ShortError(TransientError):
    """A range ended early although the connection did not break."""


class Transfer:
    """One model into one folder."""

    def __init__(
        self,
        source: Source,
        staging: Path,
        meter: Meter,
        *,
        connections: int,
        part_bytes: int,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._source = source
        self._staging = staging
        self._meter = meter
        self._connections = connections
        self._part_bytes = part_bytes
        self._pause = pause
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def fetch(self, files: Sequence[RemoteFile]) -> dict[str, str]:
        """SHA-256 by path of every file, all of them there and checked. Raises FetchError."""
        staged = [StagedFile(self._staging, file, self._part_bytes) for file in files]
        try:
            for one in staged:
                await self._disk(one.open)
                self._meter.done += one.bytes_there()
            await self._run(staged)
        finally:
            for one in staged:
                one.close()
        return {one.file.path: one.sha256 for one in staged}

    async def _run(self, staged: Sequence[StagedFile]) -> None:
        """Largest files first, so that the last to end is not the longest."""
        queue = iter([(one, index) for one in sorted(staged, key=lambda s: -s.file.size) for index in one.missing()])

        async def work() -> None:
            for one, index in queue:
                if index in one.missing():
                    await self._part(one, index)
                await self._check_once(one)

        try:
            async with asyncio.TaskGroup() as group:
                for one in staged:
                    group.create_task(self._check_once(one))
                for _ in range(self._connections):
                    group.create_task(work())
        except* (FetchError, OSError) as errors:
            raise _first(errors) from None

    async def _part(self, one: StagedFile, index: int) -> None:
        generation = one.generation
        try:
            await self._range(one, one.parts[index])
        except NoRangesError:
            if one.generation != generation:
                return
            await self._whole(one)
            return
        if one.generation == generation:
            await self._disk(partial(one.finish_part, index))

    async def _whole(self, one: StagedFile) -> None:
        """The source sends whole files only: the first to learn of it takes the file from its beginning, alone."""
        self._meter.add(-one.bytes_there())
        one.reset((Part(0, one.file.size),))
        try:
            await self._range(one, one.parts[0])
        except NoRangesError as error:
            raise SourceUnavailableError(f"{one.file.path}: neither ranges nor whole files are sent: check model.endpoint") from error
        await self._disk(partial(one.finish_part, 0))

    async def _range(self, one: StagedFile, part: Part) -> None:
        """Bytes of a part into its place; a broken range goes on where it broke."""
        at, attempt, restarts = part.start, 0, 0
        while at < part.end:
            before = at
            try:
                at, broken = await self._read(one, at, part)
            except NoRangesError:
                restarts += 1
                if at == part.start or (part.start, part.end) != (0, one.file.size) or restarts >= ATTEMPTS:
                    raise
                # Only whole files are sent: what broke begins anew.
                self._meter.add(part.start - at)
                at = part.start
                continue
            if broken is None and at < part.end:
                broken = _ShortError(f"{one.file.path}: ended after {at} of {part.end} bytes")
            if broken is not None:
                attempt = 0 if at - before >= PROGRESS_BYTES else attempt + 1
                await _before_another(attempt, broken, self._pause)

    async def _read(self, one: StagedFile, at: int, part: Part) -> tuple[int, TransientError | None]:
        """How far the range came, and what broke it."""
        held = bytearray()
        broken: TransientError | None = None
        pieces = self._source.read(one.file, at, part.end)
        try:
            async with aclosing(pieces) as stream:  # type: ignore[type-var]  # every source's `read` is an async generator
                async for piece in stream:
                    held += piece
                    if at + len(held) > part.end:
                        raise SourceCorruptError(f"{one.file.path}: the source sends more than the {one.file.size} bytes that it lists")
                    if len(held) >= WRITE_BYTES:
                        at, held = await self._put(one, at, held), bytearray()
        except TransientError as error:
            broken = error
        return await self._put(one, at, held), broken

    async def _put(self, one: StagedFile, at: int, held: bytearray) -> int:
        if held:
            await self._disk(lambda: one.write(held, at))
            self._meter.add(len(held))
        return at + len(held)

    async def _check_once(self, one: StagedFile) -> None:
        if not one.missing() and not one.sha256 and not one.checked:
            one.checked = True
            await self._check(one)

    async def _check(self, one: StagedFile) -> None:
        """Read the file back. What is wrong is fetched once more, whole: a crash may have left a hole."""
        for last in (False, True):
            async with self._checks:
                sums = await self._disk(lambda: sums_of(one.path, git=bool(one.file.git_sha1)))
            wrong = _difference(one.file, sums)
            if not wrong:
                await self._disk(partial(one.finish, sums.sha256))
                return
            if last:
                raise SourceCorruptError(f"{one.file.path}: {wrong}: upload the file again at its source, or name another revision")
            logger.warning("fetched again", extra={"file": one.file.path, "error": wrong})
            self._meter.add(-one.file.size)
            await self._disk(one.reset)
            for index in one.missing():
                await self._part(one, index)

    async def _disk(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise meaning(error, self._staging) from error


def pause_seconds(attempt: int, error: TransientError) -> float:
    """What the source asked for, else longer each time, spread so that pods of a fleet do not come back at once."""
    if error.retry_after_seconds is not None:
        return error.retry_after_seconds
    return min(LAST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * float(2**attempt)) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


async def with_attempts(work: Callable[[], Awaitable[T]], pause: Pause = asyncio.sleep) -> T:
    """`work`, tried again ATTEMPTS times where that may help. Raises FetchError."""
    attempt = 0
    while True:
        try:
            return await work()
        except TransientError as error:
            attempt += 1
            await _before_another(attempt, error, pause)


async def _before_another(attempt: int, error: TransientError, pause: Pause) -> None:
    """Wait as long as another attempt should. Raises FetchError where there were ATTEMPTS of them."""
    if attempt >= ATTEMPTS:
        raise _given_up(error, attempt) from error
    logger.warning("trying again", extra={"attempt": attempt, "error": str(error)})
    await pause(pause_seconds(attempt, error))


def _given_up(error: TransientError, attempts: int) -> FetchError:
    if isinstance(error, _ShortError):
        return SourceCorruptError(f"{error}, {attempts} times: the source lists another length than it sends: upload the file again")
    return SourceUnavailableError(f"{error}, {attempts} times in a row: check model.endpoint, the network and the proxy; it is tried again")


def _difference(file: RemoteFile, sums: Sums) -> str:
    if file.sha256 and file.sha256 != sums.sha256:
        return f"SHA-256 is {sums.sha256}, the source says {file.sha256}"
    if file.git_sha1 and not file.sha256 and file.git_sha1 != sums.git_sha1:
        return f"git SHA-1 is {sums.git_sha1}, the source says {file.git_sha1}"
    return ""


def _first(errors: BaseExceptionGroup[FetchError | OSError]) -> Exception:
    """One error of those that ended the transfer; that of the first task to fail."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))
