"""The monitor's HTTP server: the report, metrics, health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, REPORT_PATH
from npufleet_monitor.metrics import CONTENT_TYPE, render
from npufleet_monitor.monitor import Monitor
from npufleet_monitor.vllm_server import VllmAdminServer

logger = logging.getLogger(__name__)


class MonitorServer(uvicorn.Server):
    """Ends promptly on SIGTERM, which the kubelet sends to a sidecar when the engine has ended, and when the monitor's loops fail:
    the container has no probes, so that a monitor that only looks alive would stay.
    """

    def __init__(self, monitor: Monitor, host: str, port: int, admin: VllmAdminServer | None = None) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(monitor, self._loops_ended, admin),
                host=host,
                port=port,
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. Unlike the library's, it does not raise the signal again: an end that was asked for is no error."""
        self.force_exit = self.should_exit
        self.should_exit = True

    def _loops_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.critical("the monitor's loops ended", exc_info=task.exception())
            self.failed = True
            self.should_exit = True


def build_app(monitor: Monitor, ended: Callable[[asyncio.Task[None]], None], admin: VllmAdminServer | None = None) -> Starlette:
    """The application. Its lifespan runs the monitor's loops and `admin`; `ended` is told when the loops end."""

    async def report(_: Request) -> Response:
        return Response(monitor.report().model_dump_json(), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(render(monitor), media_type=CONTENT_TYPE)

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if admin is not None:
                await stack.enter_async_context(admin.serving())
            task = asyncio.create_task(monitor.run(), name="monitor")
            task.add_done_callback(ended)
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])

    return Starlette(
        routes=[Route(REPORT_PATH, report), Route(METRICS_PATH, metrics), Route(HEALTH_PATH, health)],
        lifespan=lifespan,
    )
