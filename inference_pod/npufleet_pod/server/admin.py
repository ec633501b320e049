"""The admin port: the operator's side of the engine."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from npufleet_api.contract import DRAIN_CANCEL_PATH, DRAIN_PATH, HEALTH_PATH, STATE_PATH, AdminState, DrainRequest
from npufleet_pod.server.bodies import read_body
from npufleet_pod.server.openai import add_error_handlers
from npufleet_pod.server.serving import Serving

MAX_BODY_BYTES = 64 * 1024


def create_admin_app(serving: Serving) -> FastAPI:
    """The application behind the admin port."""
    app = FastAPI(title="npufleet inference pod, admin", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    add_error_handlers(app)
    lifecycle = serving.lifecycle

    @app.get(HEALTH_PATH)
    async def health() -> dict[str, str]:
        """200 as long as the process answers."""
        return {"status": "ok"}

    @app.get(STATE_PATH)
    async def state() -> AdminState:
        """Where the engine stands."""
        return lifecycle.admin_state()

    @app.post(DRAIN_PATH)
    async def drain(request: Request) -> AdminState:
        """Refuse new work and let the running finish."""
        body = await read_body(request, DrainRequest, MAX_BODY_BYTES)
        lifecycle.drain(body.deadline_seconds, body.reason)
        return lifecycle.admin_state()

    @app.post(DRAIN_CANCEL_PATH)
    async def cancel_drain() -> Response:
        """Take work again; 409 once the process was told to end."""
        status = 200 if lifecycle.cancel_drain() else 409
        return JSONResponse(lifecycle.admin_state().model_dump(mode="json"), status)

    return app
