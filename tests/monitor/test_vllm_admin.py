"""The admin port beside vLLM, over real HTTP, against a server with vLLM's routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from monitor.monitor_support import Clock, EngineMetrics, Listener, eventually, free_port, write_settings
from npufleet_api.contract import AdminState, EngineState
from npufleet_api.report import DataState, parse_monitor_report
from npufleet_monitor.monitor import Monitor, Sources
from npufleet_monitor.server import build_app
from npufleet_monitor.settings import Identity, SettingsFile
from npufleet_monitor.vllm_admin import Timing, VllmAdmin
from npufleet_monitor.vllm_server import VllmAdminServer

QUICK = Timing(settle_seconds=0, quiet_seconds=0, poll_seconds=0.005)


class Vllm(Listener):
    """vLLM's routes, as an OpenAI server under load shows them: it takes requests as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = EngineMetrics()
        self.healthy = True
        self.page: bytes | None = None
        """What /metrics shows instead."""
        self.release = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.post("/v1/completions", self._complete),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.page() if self.page is None else self.page)

    async def _complete(self, _: web.Request) -> web.Response:
        self.metrics.running.inc()
        try:
            await self.release.wait()
        finally:
            self.metrics.running.dec()
        return web.json_response({"choices": [{"text": "!"}]})


@pytest.fixture
async def vllm() -> AsyncIterator[Vllm]:
    served = Vllm()
    await served.start()
    yield served
    served.release.set()
    await served.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as opened:
        yield opened


@pytest.fixture
async def admin_url(vllm: Vllm) -> AsyncIterator[str]:
    server = VllmAdminServer(vllm.url(), "127.0.0.1", 0, QUICK)
    async with server.serving():
        yield f"http://127.0.0.1:{server.port}"


async def ask(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> tuple[int, str]:
    async with session.request(method, url, json=body) as response:
        return response.status, await response.text()


async def state(session: aiohttp.ClientSession, url: str) -> AdminState:
    status, text = await ask(session, "GET", f"{url}/state")
    assert status == 200
    return AdminState.model_validate_json(text)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds; the test's own timeout ends a hopeless wait."""
    while not await condition():  # noqa: ASYNC110  # what is waited for is on the other side of HTTP
        await asyncio.sleep(0.005)


async def runs_one(session: aiohttp.ClientSession, url: str) -> bool:
    return (await state(session, url)).running == 1


async def test_a_request_that_runs_is_waited_for_and_its_answer_arrives(vllm: Vllm, session: aiohttp.ClientSession, admin_url: str) -> None:
    assert (await ask(session, "GET", f"{admin_url}/ready"))[0] == 200
    request = asyncio.create_task(ask(session, "POST", f"{vllm.url()}/v1/completions", {"prompt": "x"}))
    await until(lambda: runs_one(session, admin_url))
    status, text = await ask(session, "POST", f"{admin_url}/drain", {"deadline_seconds": 60, "reason": "ScaledDown"})
    drained = AdminState.model_validate_json(text)
    assert (status, drained.state, drained.running) == (200, EngineState.DRAINING, 1)
    assert drained.drain_deadline_seconds is not None
    assert (await ask(session, "GET", f"{admin_url}/ready"))[0] == 503
    assert (await state(session, admin_url)).state is EngineState.DRAINING
    vllm.release.set()
    assert (await request)[0] == 200

    async def is_idle() -> bool:
        return (await state(session, admin_url)).state is EngineState.IDLE

    await until(is_idle)


async def test_a_cancelled_drain_is_ready_again(session: aiohttp.ClientSession, admin_url: str) -> None:
    await ask(session, "POST", f"{admin_url}/drain", {"deadline_seconds": 60})
    assert (await ask(session, "POST", f"{admin_url}/drain/cancel"))[0] == 200
    assert (await ask(session, "GET", f"{admin_url}/ready"))[0] == 200
    assert (await state(session, admin_url)).state is EngineState.READY


async def test_the_end_waits_for_what_runs_and_cannot_be_cancelled(vllm: Vllm, session: aiohttp.ClientSession, admin_url: str) -> None:
    request = asyncio.create_task(ask(session, "POST", f"{vllm.url()}/v1/completions", {"prompt": "x"}))
    await until(lambda: runs_one(session, admin_url))
    hook = asyncio.create_task(ask(session, "GET", f"{admin_url}/terminate?accept_seconds=0&drain_seconds=60"))

    async def is_unready() -> bool:
        return (await ask(session, "GET", f"{admin_url}/ready"))[0] == 503

    await until(is_unready)
    assert (await ask(session, "POST", f"{admin_url}/drain/cancel"))[0] == 409
    assert not hook.done()
    vllm.release.set()
    assert (await request)[0] == 200
    status, text = await hook
    assert status == 200
    assert AdminState.model_validate_json(text).state is EngineState.IDLE


async def test_a_vllm_that_the_kubelet_restarts_begins_anew(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    admin = VllmAdmin(session, vllm.url(), QUICK)
    await admin.state()
    await admin.terminate(0, 60)
    assert not await admin.ready()
    await vllm.stop()
    assert (await admin.state()).state is EngineState.LOADING
    await vllm.start()
    assert await admin.ready()
    assert (await admin.state()).state is EngineState.READY


async def test_a_vllm_that_hangs_is_not_waited_for(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    admin = VllmAdmin(session, vllm.url(), Timing(sick_seconds=0.02, poll_seconds=0.005))
    await admin.state()
    vllm.healthy = False
    await admin.terminate(0, 3600)
    assert not await admin.ready()


async def test_the_end_is_bounded(vllm: Vllm, session: aiohttp.ClientSession, admin_url: str) -> None:
    vllm.metrics.waiting.set(3)
    status, text = await ask(session, "GET", f"{admin_url}/terminate?accept_seconds=0&drain_seconds=0.01")
    found = AdminState.model_validate_json(text)
    assert (status, found.state, found.waiting, found.drain_deadline_seconds) == (200, EngineState.DRAINING, 3, 0)


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "/drain", {}, "deadline_seconds"),
        ("POST", "/drain", {"deadline_seconds": -1}, "deadline_seconds"),
        ("POST", "/drain", {"deadline_seconds": 1, "force": True}, "force"),
        ("POST", "/drain", None, "JSON"),
        ("GET", "/terminate", None, "accept_seconds: ''"),
        ("GET", "/terminate?accept_seconds=nan&drain_seconds=1", None, "accept_seconds: 'nan'"),
        ("GET", "/terminate?accept_seconds=1&drain_seconds=1e9", None, "drain_seconds: '1e9'"),
    ],
)
async def test_what_is_not_agreed_changes_nothing(
    session: aiohttp.ClientSession, admin_url: str, method: str, path: str, body: Any, says: str
) -> None:
    status, text = await ask(session, method, f"{admin_url}{path}", body)
    assert status == 400
    assert says in text
    assert (await state(session, admin_url)).state is EngineState.READY


async def test_a_vllm_that_loads_is_not_ready_and_drains_at_once(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    await vllm.stop()
    admin = VllmAdmin(session, vllm.url())
    assert not await admin.ready()
    assert (await admin.state()).state is EngineState.LOADING
    admin.drain(60)
    assert (await admin.state()).state is EngineState.IDLE
    assert admin.cancel_drain()
    await vllm.start()
    assert await admin.ready()


async def test_a_drain_is_not_over_before_clients_know_and_quiet_has_lasted(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    clock = Clock()
    admin = VllmAdmin(session, vllm.url(), Timing(settle_seconds=5, quiet_seconds=1), clock)
    assert (await admin.state()).state is EngineState.READY
    admin.drain(60)
    for seconds, expected in ((0, "Draining"), (4.9, "Draining"), (0.1, "Idle")):
        clock.now += seconds
        assert (await admin.state()).state == expected
    vllm.metrics.running.set(1)
    assert (await admin.state()).state is EngineState.DRAINING
    vllm.metrics.running.set(0)
    for seconds, expected in ((0, "Draining"), (0.9, "Draining"), (0.1, "Idle")):
        clock.now += seconds
        assert (await admin.state()).state == expected


async def test_of_several_deadlines_the_earliest_holds(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    clock = Clock()
    admin = VllmAdmin(session, vllm.url(), QUICK, clock)
    for deadline, left in ((60, 60), (30, 30), (90, 30)):
        admin.drain(deadline)
        assert (await admin.state()).drain_deadline_seconds == left
    clock.now += 40
    assert (await admin.state()).drain_deadline_seconds == 0


@pytest.mark.parametrize("page", [b"", b"vllm:num_requests_running 0\n", b"\xff", b"vllm:num_requests_running{ 0\n"])
async def test_a_load_that_cannot_be_read_is_never_idle(vllm: Vllm, session: aiohttp.ClientSession, page: bytes) -> None:
    admin = VllmAdmin(session, vllm.url(), QUICK)
    await admin.state()
    admin.drain(60)
    vllm.page = page
    assert (await admin.state()).state is EngineState.DRAINING


async def test_a_sick_vllm_is_unready_and_its_drain_is_not_over(vllm: Vllm, session: aiohttp.ClientSession) -> None:
    admin = VllmAdmin(session, vllm.url(), QUICK)
    assert await admin.ready()
    vllm.healthy = False
    assert not await admin.ready()
    admin.drain(60)
    assert (await admin.state()).state is EngineState.DRAINING


async def test_the_monitor_serves_the_port_and_reports_by_it(tmp_path: Path, vllm: Vllm, session: aiohttp.ClientSession) -> None:
    admin = VllmAdminServer(vllm.url(), "127.0.0.1", free_port(), QUICK)
    sources = Sources(metrics_url=f"{vllm.url()}/metrics", state_url=f"http://127.0.0.1:{admin.port}/state")
    monitor = Monitor(Identity("r0", "team-a", "u"), SettingsFile(write_settings(tmp_path)), sources)
    vllm.metrics.running.set(2)
    app = build_app(monitor, lambda _: None, admin)
    async with app.router.lifespan_context(app):
        await eventually(lambda: monitor.readings.data is DataState.FRESH)
        report = parse_monitor_report(monitor.report().model_dump_json().encode())
    assert report.engine is not None
    assert (report.engine.state, report.engine.running) == (EngineState.READY, 2)
    with pytest.raises(aiohttp.ClientConnectionError):
        await state(session, f"http://127.0.0.1:{admin.port}")
