"""The admin port beside vLLM: what the operator and the kubelet ask of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from pydantic import ValidationError

from npufleet_api.contract import (
    DRAIN_CANCEL_PATH,
    DRAIN_PATH,
    HEALTH_PATH,
    READY_PATH,
    STATE_PATH,
    TERMINATE_PATH,
    AdminState,
    DrainRequest,
)
from npufleet_monitor.collectors.http import open_session
from npufleet_monitor.vllm_admin import DEFAULT_TIMING, Timing, VllmAdmin

MAX_BODY_BYTES = 64 * 1024
MAX_SECONDS = 86400.0
SHUTDOWN_SECONDS = 1.0


class VllmAdminServer:
    """Serves a VllmAdmin."""

    def __init__(self, url: str, host: str, port: int, timing: Timing = DEFAULT_TIMING) -> None:
        """url: vLLM's address, without a path. port: 0 chooses one, which `port` then tells."""
        self._url = url.rstrip("/")
        self._host = host
        self.port = port
        self._timing = timing

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen until the context is left. Raises OSError where the port is taken."""
        async with open_session() as session:
            runner = web.AppRunner(
                build_admin_app(VllmAdmin(session, self._url, self._timing)), access_log=None, shutdown_timeout=SHUTDOWN_SECONDS
            )
            await runner.setup()
            try:
                await web.TCPSite(runner, self._host, self.port).start()
                self.port = runner.addresses[0][1]
                yield
            finally:
                await runner.cleanup()


def build_admin_app(admin: VllmAdmin) -> web.Application:
    """The application behind the port."""

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ready\n") if await admin.ready() else web.Response(status=503, text="not ready\n")

    async def state(_: web.Request) -> web.Response:
        return _answer(await admin.state())

    async def drain(request: web.Request) -> web.Response:
        try:
            asked = DrainRequest.model_validate_json(await request.read())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            return web.Response(status=400, text=f"{where}: {first['msg']}\n")
        admin.drain(asked.deadline_seconds, asked.reason)
        return _answer(await admin.state())

    async def cancel(_: web.Request) -> web.Response:
        status = 200 if admin.cancel_drain() else 409
        return _answer(await admin.state(), status)

    async def terminate(request: web.Request) -> web.Response:
        try:
            accept, drain = (_seconds(request, name) for name in ("accept_seconds", "drain_seconds"))
        except ValueError as error:
            return web.Response(status=400, text=f"{error}\n")
        await admin.terminate(accept, drain)
        return _answer(await admin.state())

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_get(HEALTH_PATH, health)
    app.router.add_get(READY_PATH, ready)
    app.router.add_get(STATE_PATH, state)
    app.router.add_post(DRAIN_PATH, drain)
    app.router.add_post(DRAIN_CANCEL_PATH, cancel)
    app.router.add_get(TERMINATE_PATH, terminate)
    return app


def _answer(state: AdminState, status: int = 200) -> web.Response:
    return web.json_response(text=state.model_dump_json(), status=status)


def _seconds(request: web.Request, name: str) -> float:
    given = request.query.get(name, "")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"{name}: {given[:32]!r} is no time of 0 to {MAX_SECONDS:g} s")
    return seconds
