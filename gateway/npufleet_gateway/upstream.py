"""Connections to the replicas: one pool of them, and what of the headers goes through."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable

from npufleet_api.contract import CLASS_HEADER, DEADLINE_HEADER, DRAINING_HEADER, REPLICA_HEADER, REQUEST_ID_HEADER
from npufleet_gateway.connection import Connection, Head, Headers
from npufleet_gateway.errors import ResetError, UnreachableError

RawHeaders = Iterable[tuple[bytes, bytes]]
Address = tuple[str, int]

KEEPALIVE_SECONDS = 3.0
"""Idle connections are closed before the replica's server closes them (uvicorn: after 5 s), so that no request meets a closing one."""
MAX_IDLE_CONNECTIONS = 1024
"""Of each replica."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110, section 7.6.1; a Connection header may name more."""
REQUEST_ID = REQUEST_ID_HEADER.encode()
REPLICA = REPLICA_HEADER.encode()
DRAINING = DRAINING_HEADER.encode()
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"cookie"})
FOR_THE_GATEWAY = frozenset({b"host", b"content-length", b"accept-encoding", b"expect", CLASS_HEADER.encode(), DEADLINE_HEADER.encode()})
NOT_TO_REPLICAS = HOP_BY_HOP | CREDENTIALS | FOR_THE_GATEWAY | {REQUEST_ID}
"""Credentials end at the gateway, and bodies are not compressed between the two."""
NOT_TO_CLIENTS = HOP_BY_HOP | {b"content-length", b"date", b"server", b"set-cookie", DRAINING, REQUEST_ID, REPLICA}
MAX_REQUEST_ID_LENGTH = 128
NOT_PRINTABLE = re.compile(rb"[^\t\x20-\x7e]")


class Upstream:
    """The pooled connections of a gateway. `request` and the answer's `read` raise the ReplicaErrors of `connection`."""

    def __init__(self, connect_timeout_seconds: float, idle_seconds: float) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._idle_seconds = idle_seconds
        self._idle: dict[Address, list[Connection]] = {}
        self._all: set[Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None

    async def request(self, host: str, port: int, head: bytes, body: bytes) -> tuple[Connection, Head]:
        """Send a request and wait for the head of its answer; the connection then belongs to the caller, who gives it to `release`.

        A pooled connection that turns out closed before any byte of an answer says nothing about the request: it is sent once more, over
        a new one. Raises UnreachableError, ResetError, GarbageError and SilentError.
        """
        address = (host, port)
        connection = self._pooled(address)
        if connection is not None:
            try:
                return connection, await self._exchange(connection, head, body)
            except ResetError:
                if connection.answered:
                    raise
        connection = await self._connect(address)
        return connection, await self._exchange(connection, head, body)

    def release(self, host: str, port: int, connection: Connection) -> None:
        """Take a connection back: it is kept if its answer was read to the end, else closed."""
        if not connection.reusable:
            connection.close()
            return
        idle = self._idle.setdefault((host, port), [])
        if len(idle) >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._reaper is None:
            self._reaper = loop.call_later(KEEPALIVE_SECONDS / 2, self._reap)

    async def close(self) -> None:
        """Close every connection."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        self._idle.clear()
        for connection in list(self._all):
            connection.close()
        while self._all:  # noqa: ASYNC110  # the transports end in the loop's next rounds
            await asyncio.sleep(0)

    async def _exchange(self, connection: Connection, head: bytes, body: bytes) -> Head:
        try:
            connection.send(head, body)
            return await connection.head()
        except BaseException:
            connection.close()
            raise

    def _pooled(self, address: Address) -> Connection | None:
        """The connection that was used last: the others may fall idle and be closed."""
        idle = self._idle.get(address)
        if not idle:
            return None
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, address: Address) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, self._idle_seconds, self._all.discard)
        try:
            async with asyncio.timeout(self._connect_timeout_seconds):
                await loop.create_connection(lambda: connection, *address)
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {self._connect_timeout_seconds:g} seconds") from error
        except OSError as error:
            raise UnreachableError(f"no connection: {error}"[:200]) from error
        self._all.add(connection)
        return connection

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEPALIVE_SECONDS
        kept: dict[Address, list[Connection]] = {}
        for address, idle in self._idle.items():
            for connection in idle:
                if connection.reusable and connection.idle_since >= oldest:
                    kept.setdefault(address, []).append(connection)
                else:
                    connection.close()
        self._idle = kept
        self._reaper = loop.call_later(KEEPALIVE_SECONDS / 2, self._reap) if kept else None


def request_head(method: str, path: str, authority: str, raw: RawHeaders, request_id: str, length: int, extra: Headers = []) -> bytes:  # noqa: B006  # never written to
    """A request's head. Of a client's headers, those for the gateway alone stay here, and so do values that are not printable ASCII.

    A client's query stays at the gateway: no proxied route takes one.
    """
    named = _named(raw)
    lines = [f"{method} {path} HTTP/1.1\r\nhost: {authority}\r\n{REQUEST_ID_HEADER}: {request_id}\r\ncontent-length: {length}\r\n".encode()]
    lines.extend(
        b"%s: %s\r\n" % (name, value)
        for name, value in raw
        if name not in NOT_TO_REPLICAS and name not in named and NOT_PRINTABLE.search(value) is None
    )
    lines.extend(b"%s: %s\r\n" % pair for pair in extra)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_headers(head: Head, request_id: str, replica: str) -> Headers:
    """What a client gets of a replica's headers."""
    named = _named(head.headers)
    kept = [(name, value) for name, value in head.headers if name not in NOT_TO_CLIENTS and name not in named]
    kept.append((REQUEST_ID, request_id.encode()))
    kept.append((REPLICA, replica.encode()))
    return kept


def request_id_of(raw: RawHeaders) -> str:
    """The client's own request id where it is printable and short, else a new one."""
    for name, value in raw:
        if name == REQUEST_ID and 0 < len(value) <= MAX_REQUEST_ID_LENGTH and all(33 <= byte <= 126 for byte in value):
            return value.decode("ascii")
    return f"{random.getrandbits(128):032x}"


def _named(headers: RawHeaders) -> frozenset[bytes]:
    """Headers that a Connection header declares hop-by-hop."""
    for name, _ in headers:
        if name == b"connection":
            return frozenset(token.strip().lower() for key, value in headers if key == name for token in value.split(b","))
    return frozenset()
