"""One HTTP/1.1 connection to a replica, over llhttp: a chunk costs one read, one parse and one wake-up.

aiohttp's client spends several times as much on a request, and its session, cookies, redirects and decompression are of no use here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from npufleet_gateway.errors import GarbageError, ReplicaError, ResetError, SilentError

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
"""A longer head of an answer is garbage."""
HIGH_WATER_BYTES = 64 * 1024
"""With so much unread, reading pauses: a slow client holds its replica back, and nobody's memory grows."""


@dataclass(slots=True)
class Head:
    """Status and headers (names in lower case) of an answer."""

    status: int = 0
    headers: Headers = field(default_factory=list)

    def get(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def content_type(self) -> bytes:
        """The media type alone."""
        return (self.get(b"content-type") or b"").partition(b";")[0].strip().lower()


class Connection(asyncio.Protocol):
    """Carries one exchange at a time: `send`, then `head`, then `read` until b"".

    `head` and `read` raise ResetError, GarbageError or, after `idle_seconds` without a byte, SilentError; the connection is then closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, idle_seconds: float, lost: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._idle_seconds = idle_seconds
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_byte = 0.0
        self._head = Head()
        self._head_bytes = 0
        self._head_complete = False
        self._framed = False
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._complete = True
        self._keep_alive = False
        self._error: ReplicaError | None = None
        self.idle_since = 0.0
        """When the connection was last given back, on the loop's clock."""
        self.exchanges = 0
        """Requests that were sent so far."""

    @property
    def open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._error is None

    @property
    def reusable(self) -> bool:
        """Whether the answer was read to its end and the replica keeps the connection."""
        return self.open and self._complete and self._keep_alive and not self._chunks

    @property
    def answered(self) -> bool:
        """Whether any byte of the answer has come."""
        return self._head_bytes > 0

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request. Raises ResetError on a connection that was lost."""
        if self._transport is None:
            raise ResetError("closed the connection")
        self._head = Head()
        self._head_bytes = 0
        self._head_complete = self._framed = self._complete = self._keep_alive = False
        self.exchanges += 1
        self._last_byte = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_seconds, self._check_silence)
        self._transport.writelines([head, body])

    async def head(self) -> Head:
        """The answer's head."""
        while not self._head_complete:
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """What has come of the body since; b"" at its end."""
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait()
        chunks = self._chunks
        part = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return part

    def close(self) -> None:
        """Close at once: what the replica still sends is not read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._last_byte = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: ReplicaError) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def _check_silence(self) -> None:
        """The timer is set once and moved on when it fires, so that a chunk costs no timer."""
        self._timer = None
        if self._complete:
            return
        left = self._last_byte + self._idle_seconds - self._loop.time()
        if left <= 0 and self._waiter is not None:
            self._fail(SilentError(f"sent nothing for {self._idle_seconds:g} seconds"))
            return
        self._timer = self._loop.call_later(left if left > 0 else self._idle_seconds, self._check_silence)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._complete:
            self._fail(GarbageError("sent more than its answer"))
            return
        self._last_byte = self._loop.time()
        if not self._head_complete:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(GarbageError("changed the protocol"))
        except httptools.HttpParserError as error:
            self._fail(GarbageError(f"not HTTP: {error}"))
        else:
            if not self._head_complete and self._head_bytes > MAX_HEAD_BYTES:
                self._fail(GarbageError(f"sent a head of more than {MAX_HEAD_BYTES} bytes"))
                return
            if self._buffered > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            self._wake()

    def eof_received(self) -> None:
        """The replica sends no more: the end of an answer that says no length, else a break."""
        if self._head_complete and not self._framed and not self._complete:
            self._complete = True
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        if not self._complete:
            self._fail(ResetError(f"closed the connection{f' ({exc})' if exc else ''}"))
        self.close()
        self._lost(self)

    # httptools

    def on_message_begin(self) -> None:
        """A head begins: the answer's, or an informational one before it."""
        if self._complete:
            raise httptools.HttpParserError("a second answer")
        self._head = Head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._head.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._head.status = self._parser.get_status_code()
        if self._head.status == 101:
            raise httptools.HttpParserError("changed the protocol")
        if 100 <= self._head.status < 200:
            return
        self._framed = self._head.status in (204, 304) or any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self._head.headers
        )
        self._head_complete = True

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._head_complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()
