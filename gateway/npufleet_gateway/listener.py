"""What listens: uvicorn's HTTP over llhttp, with the bounds that it lacks, and TLS whose certificate is renewed in place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from npufleet_gateway.asgi import CLIENT, Client
from npufleet_gateway.errors import ConfigurationError

if TYPE_CHECKING:
    from npufleet_gateway.gateway import Gateway

logger = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 75
"""Longer than the 60 s after which common load balancers drop idle connections, so that they and not we close them."""
TLS_POLL_SECONDS = 5.0
STALL_SECONDS = 0.5
"""A timer that is so late tells of the process, not of the client."""
CERTIFICATE, PRIVATE_KEY = "tls.crt", "tls.key"


class BoundedProtocol(HttpToolsProtocol):
    """Cuts off clients that take too long over a request's head, or whose head is too long. uvicorn waits for ever and reads on."""

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        application: Any = config.app
        self._head_seconds: float = application.settings.head_timeout_seconds
        self._max_head_bytes: int = application.settings.max_head_bytes
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._client = Client()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client connected."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Something came."""
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > self._max_head_bytes:
            self._refuse(b"431 Request Header Fields Too Large")

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing here is upgraded, and a client's wish for it is no reason for uvicorn's advice in the log."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CLIENT] = self._client

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._stop_head_timer()
        super().connection_lost(exc)
        self._client.left()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._start_head_timer()

    def _start_head_timer(self) -> None:
        due = self.loop.time() + self._head_seconds
        self._head_timer = self.loop.call_at(due, self._head_is_late, due)

    def _head_is_late(self, due: float) -> None:
        """Timers run before sockets are read: after a stall of the whole process, what the client sent in time may wait to be read."""
        if self.loop.time() - due > STALL_SECONDS:
            self._start_head_timer()
        else:
            self._refuse(b"408 Request Timeout")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: bytes) -> None:
        self._stop_head_timer()
        if not self.transport.is_closing():
            if self._head_bytes:
                self.transport.write(b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status)
            self.transport.close()


def configuration(gateway: Gateway, host: str, port: int, **more: Any) -> uvicorn.Config:
    """uvicorn's configuration of a listener."""
    return uvicorn.Config(
        gateway,
        host=host,
        port=port,
        http=BoundedProtocol,
        ws="none",
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEPALIVE_SECONDS,
        timeout_graceful_shutdown=int(gateway.settings.grace_seconds),
        backlog=4096,
        **more,
    )


class TlsServer(uvicorn.Server):
    """A listener with TLS beside the plain one. New handshakes use the certificate that is there; connections that stand keep theirs.

    Raises ConfigurationError for a certificate that cannot be loaded.
    """

    def __init__(self, gateway: Gateway, host: str, port: int, folder: Path) -> None:
        certificate, key = folder / CERTIFICATE, folder / PRIVATE_KEY
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--tls-dir {folder}: {error}; it must hold {CERTIFICATE} and {PRIVATE_KEY} that fit each other"
            ) from error
        super().__init__(configuration(gateway, host, port, lifespan="off", ssl_certfile=str(certificate), ssl_keyfile=str(key)))
        self._files = (certificate, key)
        self._loaded: object = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the plain listener's."""
        yield

    async def follow(self) -> None:
        """Load a renewed certificate. Runs until cancelled."""
        self._loaded = await asyncio.to_thread(self._fingerprint)
        while True:
            await asyncio.sleep(TLS_POLL_SECONDS)
            await asyncio.to_thread(self.renew)

    def renew(self) -> None:
        """Load the certificate if it has changed. One that cannot be loaded is told, and the old one stays."""
        found = self._fingerprint()
        context = self.config.ssl
        if found == self._loaded or context is None:
            return
        try:
            # First into a context that nobody uses: a certificate without its key must not reach the one that does.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            logger.error("the certificate in %s is not used: %s", self._files[0].parent, error)
            return
        self._loaded = found
        logger.info("loaded the certificate in %s", self._files[0].parent)

    def _fingerprint(self) -> object:
        try:
            return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in self._files)]
        except OSError:
            return None
