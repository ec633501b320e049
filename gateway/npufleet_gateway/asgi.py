"""Small pieces of ASGI that the hot path needs: read a body within bounds, send an answer, notice that the client left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from npufleet_api.contract import REQUEST_ID_HEADER
from npufleet_gateway.errors import ApiError, body_too_large

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DISCARD_FACTOR = 4
"""A body over the limit is read on up to so many times the limit, so that the client gets to read its 413."""


class ClientLeftError(Exception):
    """The client disconnected before its request was complete."""


async def read_body(receive: Receive, limit_bytes: int, timeout_seconds: float) -> bytes:
    """The request's body. Raises ApiError (408, 413) and ClientLeftError."""
    parts: list[bytes] = []
    size = 0
    message: Message = {"more_body": True}
    try:
        async with asyncio.timeout(timeout_seconds):
            while message.get("more_body", False) and size <= limit_bytes * DISCARD_FACTOR:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                part: bytes = message.get("body", b"")
                size += len(part)
                if size <= limit_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError as error:
        raise ApiError(
            408, "invalid_request_error", "request_timeout", f"The request body did not arrive within {timeout_seconds:g} seconds."
        ) from error
    if size > limit_bytes:
        raise body_too_large(limit_bytes)
    return b"".join(parts)


async def send_answer(send: Send, status: int, body: bytes, content_type: bytes, extra: Headers | None = None) -> None:
    """A complete answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, request_id: str, extra: Headers | None = None) -> None:
    """An OpenAI error object."""
    headers = [(REQUEST_ID_HEADER.encode(), request_id.encode()), *(extra or [])]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    if error.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send_answer(send, error.status, error.body(), b"application/json", headers)


CLIENT = "npufleet.client"
"""Key of the scope under which the server puts the connection's Client."""


class Client:
    """Whoever holds one connection to the gateway."""

    __slots__ = ("_watches", "gone")

    def __init__(self) -> None:
        self.gone = False
        self._watches: set[ClientWatch] = set()

    def watch(self, watch: ClientWatch) -> None:
        """Stop `watch` when the client goes, or now if it has gone."""
        self._watches.add(watch)
        if self.gone:
            watch.stop()

    def forget(self, watch: ClientWatch) -> None:
        """Watch no longer."""
        self._watches.discard(watch)

    def left(self) -> None:
        """The connection is gone."""
        self.gone = True
        for watch in list(self._watches):
            watch.stop()


class ClientWatch:
    """While it is entered, the current task is cancelled as soon as the client disconnects; leaving swallows that cancellation.

    The task can only be cancelled at an await inside the block, so that nothing of it leaks to the server. A watch costs no task: the
    server's own protocol calls it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._task: asyncio.Task[Any] | None = None
        self.client_left = False

    def stop(self) -> None:
        """Treat the client as gone."""
        if self._task is not None and not self.client_left:
            self.client_left = True
            self._task.cancel()

    async def __aenter__(self) -> ClientWatch:
        self._task = asyncio.current_task()
        self._client.watch(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        task, self._task = self._task, None
        self._client.forget(self)
        return self.client_left and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError
