"""One request at one replica, up to the first bytes of its answer; and two replicas at once, of which the first to answer is taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from npufleet_api.contract import DRAINING_CODE
from npufleet_gateway.asgi import Scope
from npufleet_gateway.balancer import Balancer, Lease
from npufleet_gateway.connection import Connection, Head
from npufleet_gateway.errors import ReplicaError, SilentError
from npufleet_gateway.upstream import DRAINING, Upstream, request_head

DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt failed before any byte went to the client."""

    reason: str
    """A metric label: refused, draining, not_ready, reset, garbage or silent."""
    detail: str

    @property
    def unavailable(self) -> bool:
        """Whether the replica declined, as opposed to failing."""
        return self.reason in ("draining", "not_ready")

    @property
    def final(self) -> bool:
        """Whether no other replica is asked: who waited so long is not sent to wait again."""
        return self.reason == SilentError.reason


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's answer whose first bytes have come; `first` is empty where it has no body. It goes to `Sender.release`."""

    lease: Lease
    connection: Connection
    head: Head
    first: bytes


class Sender:
    """Sends one request to replicas."""

    def __init__(self, upstream: Upstream, balancer: Balancer, port: int, scope: Scope, body: bytes, request_id: str) -> None:
        self._upstream = upstream
        self._balancer = balancer
        self._port = port
        self._scope = scope
        self._body = body
        self._request_id = request_id

    async def open(self, lease: Lease, beat: Callable[[], Awaitable[None]] | None = None) -> Answer | Retry:
        """Ask the replica of `lease`. What it does wrong opens its breaker. Cancelled, it closes the connection.

        beat: called for each heartbeat that comes before the answer begins; None: a heartbeat is its beginning.
        """
        replica, balancer = lease.replica, self._balancer
        connection: Connection | None = None
        try:
            authority = f"{replica.host}:{self._port}"
            scope = self._scope
            head = request_head(scope["method"], scope["path"], authority, scope["headers"], self._request_id, len(self._body))
            connection, answer = await self._upstream.request(replica.ip, self._port, head, self._body)
            if answer.status == 503 and answer.get(DRAINING) is not None:
                balancer.draining(replica)
                return Retry("draining", f"{replica.pod_name} is draining")
            if answer.status in (502, 503):
                balancer.failed(replica)
                return Retry("not_ready", f"{replica.pod_name} answered {answer.status}")
            if not 200 <= answer.status < 600:
                balancer.failed(replica)
                return Retry("garbage", f"{replica.pod_name} answered with status {answer.status}")
            first = await connection.read()
            while beat is not None and _only_comments(first):
                await beat()
                first = await connection.read()
            if beat is not None and _handed_back(first):
                balancer.draining(replica)
                return Retry("draining", f"{replica.pod_name} is draining")
            opened = Answer(lease, connection, answer, first)
            connection = None
            return opened
        except ReplicaError as error:
            return self.failed(lease, error)
        finally:
            if connection is not None:
                self._upstream.release(replica.ip, self._port, connection)

    def failed(self, lease: Lease, error: ReplicaError) -> Retry:
        """The replica broke off before anything of its answer was passed on."""
        self._balancer.failed(lease.replica)
        return Retry(error.reason, f"{lease.replica.pod_name}: {error}")

    def release(self, answer: Answer) -> None:
        """Give an answer's connection back: to be used again if it was read to the end, else it is closed, and its replica stops."""
        self._upstream.release(answer.lease.replica.ip, self._port, answer.connection)


async def race(
    sender: Sender, lease: Lease, delay_seconds: float, spare: Callable[[], Lease | None], beat: Callable[[], Awaitable[None]]
) -> Answer | Retry:
    """The first to answer: the replica of `lease` or, where it is late, the one that `spare` gives. The loser is cancelled at once.

    A copy wins with a success only: what it refuses, the first may still serve. Heartbeats go to the client by `beat` and win nothing.
    """
    first = asyncio.create_task(sender.open(lease, beat), name="attempt")
    tasks = [first]
    winner: asyncio.Task[Answer | Retry] | None = None
    try:
        done, _ = await asyncio.wait(tasks, timeout=delay_seconds)
        if not done and (copy := spare()) is not None:
            tasks.append(asyncio.create_task(sender.open(copy, beat), name="hedge"))
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            winner = next((task for task in tasks if task in done and _counts(task.result(), original=task is first)), None)
            if winner is not None:
                break
        return (winner or first).result()
    finally:
        losers = [task for task in tasks if task is not winner]
        for task in losers:
            task.cancel()
            task.add_done_callback(lambda task: _discard(sender, task))
        try:
            if losers:
                await asyncio.wait(losers)
        except asyncio.CancelledError:
            if winner is not None:
                # Nobody gets it any more.
                _discard(sender, winner)
            raise


def _counts(answer: Answer | Retry, *, original: bool) -> bool:
    return isinstance(answer, Answer) and (original or answer.head.status < 400)


def _only_comments(chunk: bytes) -> bool:
    """Heartbeats tell that a replica lives, not that its stream has begun."""
    return chunk.startswith(b":") and all(line[:1] in (b"", b":") for line in chunk.split(b"\n"))


def _handed_back(chunk: bytes) -> bool:
    """A stream that was kept waiting by a replica that drains now: nothing of its answer was computed."""
    if DRAINING_CODE.encode() not in chunk:
        return False
    event = next((line.removeprefix(DATA) for line in chunk.split(b"\n") if line.startswith(DATA)), b"")
    try:
        return bool(json.loads(event)["error"]["code"] == DRAINING_CODE)
    except (ValueError, LookupError, TypeError):
        return False


def _discard(sender: Sender, task: asyncio.Task[Answer | Retry]) -> None:
    if not task.cancelled() and task.exception() is None and isinstance(answer := task.result(), Answer):
        sender.release(answer)
