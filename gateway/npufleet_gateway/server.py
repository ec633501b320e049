"""The HTTP server, and how it leaves: unready first, then no new connections, then the last streams."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

import uvicorn

from npufleet_gateway.gateway import Gateway

logger = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 75
"""Longer than the 60 s after which common load balancers drop idle connections, so that they and not we close them."""


class GatewayServer(uvicorn.Server):
    """A server that goes on serving for `leave_seconds` after the first SIGTERM or SIGINT; a second one ends it at once."""

    def __init__(self, gateway: Gateway, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                gateway,
                host=host,
                port=port,
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEPALIVE_SECONDS,
                timeout_graceful_shutdown=int(gateway.settings.grace_seconds),
                backlog=4096,
            )
        )
        self._gateway = gateway
        self._leaving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]  # sockets are only passed through
        """Serve until a signal has been followed."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)  # type: ignore[arg-type]  # as above
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.wait([self._leaving])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: begins to leave, or ends at once the second time."""
        if self._loop is None or self._gateway.leaving:
            self.config.timeout_graceful_shutdown = 0
            self.should_exit = True
            return
        self._gateway.leave()
        self._loop.call_soon_threadsafe(self._begin_to_leave, signal.Signals(sig).name)

    def _begin_to_leave(self, name: str) -> None:
        self._leaving = asyncio.create_task(self._leave(name), name="leave")

    async def _leave(self, name: str) -> None:
        seconds = self._gateway.settings.leave_seconds
        logger.info("%s: unready, serving on for %g s, then up to %g s for what runs", name, seconds, self._gateway.settings.grace_seconds)
        await asyncio.sleep(seconds)
        logger.info("closing, with %d requests in flight", self._gateway.live_requests)
        self.should_exit = True
