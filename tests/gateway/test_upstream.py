"""Connections to replicas: framing, silence, back-pressure and the pool, against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.support import eventually
from npufleet_gateway.connection import MAX_HEAD_BYTES, Connection, Head
from npufleet_gateway.errors import GarbageError, ReplicaError, ResetError, SilentError, UnreachableError
from npufleet_gateway.upstream import Upstream, request_head, request_id_of, response_headers

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def replica(script: Script, idle_seconds: float = 30) -> AsyncIterator[tuple[Upstream, int]]:
    """A pool, and the port of a server that plays `script` on each connection."""

    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await script(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream(2, idle_seconds)
    try:
        yield upstream, server.sockets[0].getsockname()[1]
    finally:
        await upstream.close()
        server.close()
        await server.wait_closed()
        await asyncio.gather(*serving)


def answers(*parts: bytes) -> Script:
    """Reads one request, writes the parts each on its own, and closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return script


async def exchange(upstream: Upstream, port: int) -> tuple[Head, bytes, Connection]:
    """One whole exchange."""
    connection, head = await upstream.request("127.0.0.1", port, REQUEST, b"")
    try:
        parts = []
        while part := await connection.read():
            parts.append(part)
    finally:
        upstream.release("127.0.0.1", port, connection)
    return head, b"".join(parts), connection


@pytest.mark.parametrize(
    ("parts", "status", "body"),
    [
        ((OK,), 200, b"hi"),
        ((OK[:10], OK[10:30], OK[30:]), 200, b"hi"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"), 200, b"hi"),
        ((b"HTTP/1.1 200 OK\r\n\r\nh", b"i"), 200, b"hi"),
        ((b"HTTP/1.0 200 OK\r\n\r\nhi",), 200, b"hi"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", OK), 200, b"hi"),
        ((b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK,), 200, b"hi"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), 204, b""),
    ],
)
async def test_an_answer_is_framed_as_http_says(parts: tuple[bytes, ...], status: int, body: bytes) -> None:
    async with replica(answers(*parts)) as (upstream, port):
        head, found, _ = await exchange(upstream, port)
    assert (head.status, found) == (status, body)
    assert head.get(b"link") is None


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (b"", ResetError),
        (b"HTTP/1.1 200 OK\r\n", ResetError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", ResetError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", ResetError),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n", GarbageError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", GarbageError),
        (b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n", GarbageError),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", GarbageError),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES, GarbageError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", GarbageError),
    ],
)
async def test_whatever_is_no_complete_answer_is_an_error(script: bytes, error: type[ReplicaError]) -> None:
    async with replica(answers(script)) as (upstream, port):
        with pytest.raises(error):
            await exchange(upstream, port)


async def test_what_follows_an_answer_costs_its_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + OK)
        await reader.read()

    async with replica(script) as (upstream, port):
        _, body, connection = await exchange(upstream, port)
        assert body == b"hi"
        assert not connection.open


async def test_nobody_there_is_an_error_of_its_own() -> None:
    async with replica(answers(OK)) as (_, port):
        pass
    upstream = Upstream(2, 30)
    with pytest.raises(UnreachableError):
        await exchange(upstream, port)
    await upstream.close()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh"])
async def test_a_replica_that_falls_silent_is_given_up(said: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()

    async with replica(script, idle_seconds=0.05) as (upstream, port):
        with pytest.raises(SilentError):
            await exchange(upstream, port)


async def test_a_client_that_takes_its_time_is_no_silence_of_the_replica() -> None:
    release = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK[:-1])
        await release.wait()
        writer.write(OK[-1:])

    async with replica(script, idle_seconds=0.1) as (upstream, port):
        connection, _ = await upstream.request("127.0.0.1", port, REQUEST, b"")
        assert await connection.read() == b"h"
        await asyncio.sleep(0.3)
        release.set()
        assert await connection.read() == b"i"
        upstream.release("127.0.0.1", port, connection)


async def test_connections_are_used_again_and_one_that_was_closed_meanwhile_costs_no_request() -> None:
    served: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(served)
        served.append(0)
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            served[number] += 1
            writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")

    async with replica(script) as (upstream, port):
        for _ in range(3):
            assert (await exchange(upstream, port))[1] == b"hi"
    assert served == [2, 1]


async def test_an_answer_that_breaks_off_on_a_pooled_connection_is_not_asked_for_again() -> None:
    asked = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        for answer in (OK, b"HTTP/1.1 2"):
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            writer.write(answer)

    async with replica(script) as (upstream, port):
        await exchange(upstream, port)
        with pytest.raises(ResetError):
            await exchange(upstream, port)
    assert asked == 2


async def test_a_connection_that_says_close_or_was_not_read_to_its_end_is_not_used_again() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi")

    async with replica(script) as (upstream, port):
        await exchange(upstream, port)
        connection, _ = await upstream.request("127.0.0.1", port, REQUEST, b"")
        upstream.release("127.0.0.1", port, connection)
        assert not connection.open
    assert connections == 2


async def test_what_is_not_read_holds_the_replica_back() -> None:
    sent = 0
    total = 32 * 1024 * 1024

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with replica(script) as (upstream, port):
        connection, _ = await upstream.request("127.0.0.1", port, REQUEST, b"")
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < total
        size = 0
        while part := await connection.read():
            size += len(part)
        assert size == total
        upstream.release("127.0.0.1", port, connection)


async def test_a_cancelled_wait_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(OSError):
            await reader.read()
        gone.set()

    async with replica(script) as (upstream, port):
        waiting = asyncio.create_task(exchange(upstream, port))
        await eventually(lambda: bool(upstream._all))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        await gone.wait()


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([OK, b"HTTP/1.1 200 OK\r\n", b"\r\n", b"content-length: 3\r\n"]), max_size=6))
def test_any_bytes_end_as_an_answer_or_an_error(parts: list[bytes]) -> None:
    async def one() -> None:
        async with replica(answers(*parts)) as (upstream, port):
            with contextlib.suppress(ReplicaError):
                head, _, _ = await exchange(upstream, port)
                assert 0 < head.status < 1000

    asyncio.run(one())


def test_headers_for_the_gateway_alone_do_not_reach_a_replica() -> None:
    raw = [
        (b"host", b"gateway"),
        (b"authorization", b"Bearer secret"),
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"secret"),
        (b"x-other", b"kept"),
        (b"x-latin", b"caf\xe9"),
        (b"x-control", b"a\r\nforged: yes"),
        (b"x-request-id", b"the client's"),
    ]
    head = request_head("POST", "/v1/completions", "10.0.0.1:8000", raw, "abc", 7)
    assert head == (
        b"POST /v1/completions HTTP/1.1\r\nhost: 10.0.0.1:8000\r\nx-request-id: abc\r\ncontent-length: 7\r\nx-other: kept\r\n\r\n"
    )


def test_a_replicas_own_names_and_hop_by_hop_headers_do_not_reach_a_client() -> None:
    head = Head(200, [(b"server", b"uvicorn"), (b"connection", b"x-a"), (b"x-a", b"1"), (b"content-type", b"text/plain; charset=x")])
    assert head.content_type == b"text/plain"
    assert response_headers(head, "id", "r0") == [
        (b"content-type", b"text/plain; charset=x"),
        (b"x-request-id", b"id"),
        (b"x-npufleet-replica", b"r0"),
    ]


def test_a_request_id_is_the_clients_where_it_can_be() -> None:
    assert request_id_of([(b"x-request-id", b"mine")]) == "mine"
    assert request_id_of([(b"x-request-id", b"with space")]) != "with space"
    assert request_id_of([]) != request_id_of([])
