"""The operator's own endpoints: /healthz, /readyz and /metrics on :9090."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

Problems = Callable[[], list[str]]


def build_app(problems: Problems, ready: Callable[[], bool]) -> web.Application:
    """`problems` empty means healthy. An API outage is no problem: a restart would not help."""

    async def healthz(_: web.Request) -> web.Response:
        found = problems()
        return web.json_response({"healthy": not found, "problems": found}, status=500 if found else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response({"ready": ready()}, status=200 if ready() else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app
