"""The admin port over real HTTP: what is agreed is understood, everything else is unknown, and nothing hangs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from npufleet_api.contract import EngineState
from npufleet_operator.core.observed import PodView
from npufleet_operator.errors import AdminError
from npufleet_operator.shell.engine_admin import EngineAdmin
from support.fleet import START

POD = PodView(
    namespace="team", name="p", uid="u", created=START, labels={}, owner_uid="m", owner_name="tiny", node="n", phase="Running",
    requests={}, ip="127.0.0.1",
)  # fmt: skip
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[EngineAdmin]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []
    async with aiohttp.ClientSession() as session:

        async def start(handler: Handler) -> EngineAdmin:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app)
            await runner.setup()
            runners.append(runner)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return EngineAdmin(session, port=runner.addresses[0][1])

        yield start
    for runner in runners:
        await runner.cleanup()


async def test_a_drain_tells_deadline_and_reason(serve: Serve) -> None:
    asked: list[tuple[str, str, object]] = []

    async def engine(request: web.Request) -> web.Response:
        asked.append((request.method, request.path, await request.json() if request.can_read_body else None))
        return web.json_response({"state": "Draining", "running": 2, "waiting": 1})

    admin = await serve(engine)
    state = await admin.drain(POD, 12.5, "ScaledDown")
    assert (state.state, state.running, state.waiting) == (EngineState.DRAINING, 2, 1)
    await admin.cancel(POD)
    assert asked == [("POST", "/drain", {"deadline_seconds": 12.5, "reason": "ScaledDown"}), ("POST", "/drain/cancel", None)]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"state": "Asleep"}', b'{"state": "Idle", "running": -1}', b"x" * 200_000])
async def test_an_answer_that_is_not_agreed_is_unknown(serve: Serve, body: bytes) -> None:
    async def engine(_: web.Request) -> web.Response:
        return web.Response(body=body)

    admin = await serve(engine)
    assert (await admin.probe([POD]))["u"].state is None
    with pytest.raises(AdminError):
        await admin.drain(POD, 1, "ScaledDown")


async def test_an_error_status_and_a_redirect_are_unknown(serve: Serve) -> None:
    async def engine(request: web.Request) -> web.StreamResponse:
        if request.path == "/state":
            raise web.HTTPFound("/elsewhere")
        raise web.HTTPInternalServerError

    admin = await serve(engine)
    assert (await admin.probe([POD]))["u"].state is None
    with pytest.raises(AdminError):
        await admin.cancel(POD)


async def test_a_pod_without_an_address_is_not_asked_and_a_closed_port_is_unknown(serve: Serve) -> None:
    async def engine(_: web.Request) -> web.Response:
        return web.json_response({"state": "Idle"})

    admin = await serve(engine)
    assert await admin.probe([replace(POD, ip="")]) == {}
    closed = EngineAdmin(admin._session, port=1)
    assert (await closed.probe([POD]))["u"].state is None
