"""The process: how it starts, and how it leaves without losing a request."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.api_server import MODELS, PODS, list_watch_server
from gateway.support import DONE, ROLE, Engine, chunk, eventually, free_port, loopback, model_object, pod_object, stream


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from npufleet_gateway.main import main; main()", "serve", *arguments]


def test_without_an_api_server_it_ends_with_one_clear_line() -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")}
    ended = subprocess.run(command("--pool", "prod"), env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.strip().splitlines()
    assert "set KUBECONFIG" in line


def test_a_bad_option_names_itself() -> None:
    ended = subprocess.run(command("--port", "x"), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--p" in ended.stderr


class Slow:
    """Streams one token, and the rest once it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield ROLE + chunk("one")
            await self.release.wait()
            yield chunk("two") + DONE

        return await stream(request, chunks())


async def test_a_process_serves_a_pool_and_leaves_after_its_last_stream(tmp_path: Path) -> None:
    slow = Slow()
    engine_port, port = free_port(), free_port()
    engine = Engine("127.0.0.2", slow)
    await engine.start(engine_port)
    async with list_watch_server() as server, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        await server.put(MODELS, model_object())
        await server.put(PODS, pod_object("r0"))
        process = await asyncio.create_subprocess_exec(
            *command("--pool", "prod", "--host", "127.0.0.1", "--port", str(port), "--engine-port", str(engine_port)),
            *("--monitor-port", str(free_port()), "--leave-seconds", "0.5", "--grace-seconds", "20"),
            env={**os.environ, "KUBECONFIG": str(server.kubeconfig(tmp_path)), "POD_NAME": "gateway-7"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await until_status(session, f"{url}/ready", 200)
            async with session.get(f"{url}/report") as response:
                assert (await response.json())["gateway"] == "gateway-7"
            body = {"model": "team-a/chat", "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as streaming:
                first = await streaming.content.readany()
                process.send_signal(signal.SIGTERM)
                await until_status(session, f"{url}/ready", 503)
                async with session.get(f"{url}/v1/models") as late:
                    assert late.status == 200
                await until_refused(port)
                assert process.returncode is None
                slow.release.set()
                rest = await streaming.read()
            assert first + rest == ROLE + chunk("one") + chunk("two") + DONE
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await engine.stop()


async def test_streams_that_outlive_the_grace_end_with_an_error_event() -> None:
    async with loopback(grace_seconds=1.0) as pool:
        await pool.engine(Slow())
        async with pool.stream() as response:
            await response.content.readany()
            pool.server.handle_exit(signal.SIGTERM, None)
            rest = await response.read()
        assert b"shutting down" in rest
        await pool.settled()
        assert pool.traffic().outcomes.interrupted == 1


async def test_while_it_leaves_nothing_is_refused_and_connections_are_let_go() -> None:
    async with loopback(leave_seconds=30.0) as pool:
        await pool.engine()
        pool.server.handle_exit(signal.SIGTERM, None)
        async with pool.session.get(f"{pool.url}/ready") as response:
            assert response.status == 503
        async with pool.session.get(f"{pool.url}/health") as response:
            assert response.status == 200
        async with pool.post() as response:
            assert response.status == 200
            assert response.headers["connection"] == "close"
        pool.server.handle_exit(signal.SIGTERM, None)
        await eventually(lambda: not pool.server.started or pool.server.should_exit)


async def test_a_background_task_that_ends_fails_the_liveness_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:

        async def broken(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(pool.gateway.collector, "collect", broken)
        await eventually(lambda: bool(pool.gateway.failed_tasks))
        async with pool.session.get(f"{pool.url}/health") as response:
            assert response.status == 500
            assert "collect-reports" in await response.text()
        async with pool.session.get(f"{pool.url}/ready") as response:
            assert response.status == 200


async def until_status(session: aiohttp.ClientSession, url: str, status: int) -> None:
    """Ask until the answer has the status."""
    while True:
        try:
            async with session.get(url) as response:
                if response.status == status:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.02)


async def until_refused(port: int) -> None:
    """Connect until the port refuses."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.02)
