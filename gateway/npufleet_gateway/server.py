"""The HTTP server, and how it leaves: unready first, then no new connections, then the last streams."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn

from npufleet_gateway.errors import ConfigurationError
from npufleet_gateway.gateway import Gateway
from npufleet_gateway.listener import TlsServer, configuration

logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """A server that goes on serving for `leave_seconds` after the first SIGTERM or SIGINT; a second one ends it at once."""

    def __init__(self, gateway: Gateway, host: str, port: int) -> None:
        super().__init__(configuration(gateway, host, port, lifespan="on"))
        settings = gateway.settings
        if settings.tls_only and settings.tls_dir is None:
            raise ConfigurationError("--tls-only: there is no certificate; name its folder with --tls-dir, or leave --tls-only out")
        self._tls = TlsServer(gateway, host, settings.tls_port, settings.tls_dir) if settings.tls_dir is not None else None
        self._tls_tasks: list[asyncio.Task[None]] = []
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; with TLS too, once the application runs."""
        await super().startup(sockets)
        if self._tls is not None and self.started:
            self._tls_tasks = [
                asyncio.create_task(self._tls.serve(), name="tls"),
                asyncio.create_task(self._tls.follow(), name="certificate"),
            ]
            self._tls_tasks[0].add_done_callback(self._tls_ended)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what listens with TLS first, within the same grace: the application ends with the plain listener."""
        if self._tls is not None and self._tls_tasks:
            began = time.monotonic()
            serving, following = self._tls_tasks
            self._tls.config.timeout_graceful_shutdown = self.config.timeout_graceful_shutdown
            self._tls.should_exit = True
            following.cancel()
            await asyncio.gather(serving, following, return_exceptions=True)
            left = (self.config.timeout_graceful_shutdown or 0) - (time.monotonic() - began)
            self.config.timeout_graceful_shutdown = max(0, int(left))
        await super().shutdown(sockets)

    def _tls_ended(self, task: asyncio.Task[None]) -> None:
        if not self.should_exit and not task.cancelled():
            logger.critical("the listener with TLS ended", exc_info=task.exception())
            self.should_exit = True

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
