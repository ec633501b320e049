"""The supervisor's control socket: one JSON line asked, one JSON line answered."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from devcluster.errors import ComponentError, NotRunningError
from devcluster.paths import Layout

_MAX_REPLY_BYTES = 1 << 20

Action = Literal["status", "kill", "stop", "start", "restart", "reload", "shutdown"]


class Request(BaseModel):
    """What a client asks. `component` is needed by kill, stop, start and restart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    action: Action
    component: str | None = None


class Process(BaseModel):
    """One process of the cluster. `pid` is None while it is down; seen from the supervisor until `on_host`."""

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int | None
    healthy: bool
    restarts: int = 0
    stopped: bool = False


class Reply(BaseModel):
    """What the supervisor answers; `error` is empty when it did what was asked."""

    model_config = ConfigDict(frozen=True)

    error: str = ""
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A reply and the supervisor's process id in the caller's view."""

    reply: Reply
    supervisor: int


def socket_address(layout: Layout, directory: int) -> str:
    """The control socket's address by way of an open directory: Unix sockets take at most 107 bytes of path."""
    return f"/proc/self/fd/{directory}/{layout.control.name}"


def ask(layout: Layout, request: Request, timeout_seconds: float = 30.0) -> Answer:
    """Send `request`; raises NotRunningError without a supervisor, ComponentError when it refuses."""
    name = layout.root.name
    try:
        directory = os.open(layout.root, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        raise NotRunningError(f"there is no cluster {name!r}; create it with `devcluster up --name {name}`") from None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(socket_address(layout, directory))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            connection.sendall(request.model_dump_json().encode() + b"\n")
            received = bytearray()
            while chunk := connection.recv(65536):
                received += chunk
                if len(received) > _MAX_REPLY_BYTES:
                    raise ComponentError(f"the supervisor of {name!r} answers more than {_MAX_REPLY_BYTES} bytes")
    except (ConnectionError, FileNotFoundError):
        raise NotRunningError(f"cluster {name!r} is not running; start it with `devcluster up --name {name}`") from None
    except TimeoutError as error:
        raise ComponentError(f"the supervisor of {name!r} did not answer within {timeout_seconds} s") from error
    finally:
        os.close(directory)
    if not received:
        raise NotRunningError(f"cluster {name!r} ended before it answered {request.action}; start it with `devcluster up --name {name}`")
    try:
        reply = Reply.model_validate_json(bytes(received))
    except ValidationError as error:
        raise ComponentError(f"the supervisor of {name!r} answers {request.action} with what is no reply: {error}") from error
    if reply.error:
        raise ComponentError(reply.error)
    return Answer(reply, struct.unpack("3i", credentials)[0])
