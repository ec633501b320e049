"""Chaos at the socket level: whatever replicas do, each stream ends as complete, with an error event, or as an error; never in silence."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest

from gateway.support import DONE, ROLE, chunk, loopback, pod_object

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [ROLE, *(chunk(f"token {number}") for number in range(8)), DONE]
FAULTS = ("none", "none", "reset", "close", "half-close", "stall", "garbage", "bad-chunk", "slow", "refuse", "draining", "early")


def framed(event: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(event), event)


class Chaotic:
    """A replica that picks a fault for each request, and a moment for it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # a test
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, ip: str, port: int) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, ip, port, reuse_address=True)

    async def stop(self) -> None:
        """Stop, and wait for what is served: the gateway has closed its connections."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
        fault = self._random.choice(FAULTS)
        if fault == "refuse":
            return False
        if fault == "draining":
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nx-npufleet-draining: true\r\ncontent-length: 0\r\n\r\n")
            return True
        moment = self._random.randrange(len(EVENTS))
        writer.write(HEAD)
        for number, event in enumerate(EVENTS):
            if number == moment and fault not in ("none", "slow"):
                return await self._break(fault, event, reader, writer)
            writer.write(framed(event))
            if fault == "slow":
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _break(self, fault: str, event: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if fault == "reset":
            writer.transport.abort()
        elif fault == "half-close":
            writer.write(framed(event)[:-5])
            writer.write_eof()
            await reader.read()
        elif fault == "stall":
            await reader.read()
        elif fault == "garbage":
            writer.write(b"\x00\xff\r\n" * 10)
            await reader.read()
        elif fault == "bad-chunk":
            writer.write(b"zz\r\n" + event)
            await reader.read()
        elif fault == "early":
            writer.write(b"0\r\n\r\n")
        return False


@pytest.mark.parametrize("seed", range(4))
async def test_no_stream_ends_in_silence(seed: int) -> None:
    async with loopback(upstream_idle_seconds=0.3, replica_concurrency=4, queue_seconds=20.0) as pool:
        replicas = [Chaotic(10 * seed + number) for number in range(3)]
        for number, replica in enumerate(replicas):
            await replica.start(f"127.0.0.{number + 2}", pool.gateway.settings.engine_port)
            pool.pods.append(pod_object(f"r{number}", ip=f"127.0.0.{number + 2}"))
        pool.publish()
        ended = {"complete": 0, "event": 0, "error": 0}

        async def client(number: int) -> None:
            if number % 10 == 9:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02), pool.stream() as response:
                        await response.read()
                return
            async with pool.stream() as response:
                body = await response.read()
            if response.status != 200:
                assert json.loads(body)["error"]["message"]
                ended["error"] += 1
                return
            events = [event for event in body.split(b"\n\n") if event]
            last = events[-1].removeprefix(b"data: ")
            if last == b"[DONE]":
                assert body == b"".join(EVENTS)
                ended["complete"] += 1
            elif last.startswith(b'{"error"'):
                assert json.loads(last)["error"]["code"] == "stream_interrupted"
                ended["event"] += 1
            else:
                raise AssertionError(f"ended in silence: {body[-200:]!r}")

        try:
            await asyncio.gather(*(client(number) for number in range(100)))
            await pool.settled()
            outcomes = pool.traffic().outcomes
            assert ended["complete"] > 0
            assert ended["event"] > 0
            assert outcomes.ok >= ended["complete"]
            assert pool.gateway.balancer.outstanding("pod-r0") == 0
            door = pool.gateway.admission._doors[("team-a", "chat")]
            assert (door.running, door.queued) == (0, 0)
        finally:
            await pool.gateway._context.upstream.close()  # type: ignore[union-attr]  # it runs
            for replica in replicas:
                await replica.stop()
