"""One request on its way: attempts on replicas, the relay of the answer, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from npufleet_api.slo import Exchange, Outcome, outcome_of_status, tpot_ms
from npufleet_gateway.access_log import AccessLog
from npufleet_gateway.admission import Admission
from npufleet_gateway.asgi import ClientWatch, Headers, Message, Scope, Send, send_error
from npufleet_gateway.balancer import Balancer, Lease
from npufleet_gateway.connection import Connection, Head
from npufleet_gateway.entrance import Admitted, Entrance
from npufleet_gateway.errors import (
    ApiError,
    Refusal,
    ReplicaError,
    SilentError,
    interrupted,
    no_ready_replica,
    shutting_down,
    upstream_failed,
    upstream_timeout,
)
from npufleet_gateway.hold import HEARTBEAT, Holder
from npufleet_gateway.metrics import Metrics
from npufleet_gateway.prompt import NO_PROMPT, Prompt
from npufleet_gateway.routing import Model, Replica
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.sse import TokenCounter
from npufleet_gateway.upstream import DRAINING, REQUEST_ID, Upstream, request_head, response_headers
from npufleet_gateway.view import ClusterView

HOLD_BYTES = 1024 * 1024
"""An answer that is not a stream is held back up to this size, so that a replica that dies in the middle of it can be replaced."""
DRAIN_RETRY_AFTER_SECONDS = 1
EVENT_STREAM = b"text/event-stream"
OUTCOMES = {"no_ready_replica": Outcome.NO_REPLICA, "capacity_exceeded": Outcome.OVERLOADED, "replica_timeout": Outcome.TIMEOUT}
"""How a request ended, by the code of the gateway's own error; other errors are SERVER_ERROR."""


@dataclass(slots=True)
class Context:
    """What all requests of a gateway share."""

    view: ClusterView
    balancer: Balancer
    metrics: Metrics
    settings: GatewaySettings
    clock: Callable[[], float]
    upstream: Upstream
    entrance: Entrance
    admission: Admission
    holder: Holder
    access_log: AccessLog | None = None
    leaving: bool = False
    """Once set, answers ask clients to close their connections and come back by another gateway."""

    def extra_headers(self) -> Headers:
        """Headers of every answer."""
        return [(b"connection", b"close")] if self.leaving else []


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt failed before any byte went to the client."""

    reason: str
    """A metric label: refused, draining, not_ready, reset or garbage."""
    detail: str

    @property
    def unavailable(self) -> bool:
        """Whether the replica declined, as opposed to failing."""
        return self.reason in ("draining", "not_ready")


class LiveExchange:
    """A request that has a route. `run` answers it; `result` says how it ended."""

    def __init__(
        self,
        context: Context,
        scope: Scope,
        send: Send,
        admitted: Admitted,
        name: str,
        model: Model,
        request_id: str,
        arrived: float,
        prompt: Prompt = NO_PROMPT,
        *,
        streams: bool,
    ) -> None:
        self._context = context
        self._scope = scope
        self._send_raw = send
        self._body = admitted.body
        self.admitted = admitted
        self._name = name
        self.model = model
        self.request_id = request_id
        self._arrived = arrived
        self._prompt = prompt
        self._lease: Lease | None = None
        self._streams = streams
        self._counter = TokenCounter()
        self.watch: ClientWatch | None = None
        self.sending_since: float | None = None
        """Since when the client has not taken what was sent; None while it keeps up."""
        self.status: int | None = None
        """Status that the client got; None while nothing was sent."""
        self._relaying = False
        """Whether anything of a replica's answer was sent: until then another replica can take over."""
        self.queued_ms = 0.0
        """How long it waited for a replica and a slot."""
        self._queueing_since: float | None = None
        self._admission_told = False
        self.replica: str | None = None
        self.reason = ""
        self._outcome: Outcome | None = None

    async def run(self) -> None:
        """Answer the request."""
        context = self._context
        try:
            route = context.view.table.find(self._name)
            if route is not None:
                await context.holder.wait(route, self._beat if self._streams else None)
            self._queueing_since = context.clock()
            async with context.admission.admit(self.admitted.entry):
                self._note_admission(None)
                await self._attempts()
        except ApiError as error:
            if error.refusal is not None:
                self._note_admission(error.refusal)
            self.reason = error.message
            self._outcome = OUTCOMES.get(error.code or "", Outcome.SERVER_ERROR)
            if self.status is not None:
                await self._event(error.body())
                return
            self.status = error.status
            await send_error(self._send, error, self.request_id, self._context.extra_headers())
        except asyncio.CancelledError:
            if self.watch is not None and self.watch.client_left:
                self._note_admission(Refusal.CLIENT_LEFT)
                self._outcome = self._outcome or Outcome.CANCELLED
            else:
                self._outcome = Outcome.INTERRUPTED
                if self.status is None:
                    await send_error(self._send, shutting_down(), self.request_id, self._context.extra_headers())
                else:
                    await self._end_early("the gateway is shutting down")
            raise

    def _note_admission(self, refusal: Refusal | None) -> None:
        """Count once how the request came through the doors; None: it did."""
        if self._admission_told:
            return
        self._admission_told = True
        now = self._context.clock()
        self.queued_ms = (now - self._arrived) * 1000
        seconds = None if self._queueing_since is None else now - self._queueing_since
        self._context.metrics.admission(self.model.key, self.admitted.classification.name, refusal, seconds)

    def result(self) -> Exchange:
        """How the request ended, as its client saw it."""
        first = self._counter.first_token_time
        return Exchange(
            outcome=self._outcome or Outcome.SERVER_ERROR,
            streamed=self._streams,
            elapsed_ms=(self._context.clock() - self._arrived) * 1000,
            ttft_ms=None if first is None else (first - self._arrived) * 1000,
            tpot_ms=self._tpot_ms(),
            prompt_tokens=self._counter.prompt_tokens or self._prompt.tokens,
            generated_tokens=self._counter.tokens,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the prompt (an estimate) and of the answer."""
        return self._prompt.tokens + self._counter.tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer, as far as they are known."""
        return self._counter.tokens

    def first_token_time(self) -> float | None:
        """When the client's stream began to carry text, by the clock of all requests."""
        return self._counter.first_token_time

    def _tpot_ms(self) -> float | None:
        first, last = self._counter.first_token_time, self._counter.last_token_time
        return None if first is None or last is None else tpot_ms(first, last, self._counter.tokens)

    async def _attempts(self) -> None:
        context = self._context
        tried: set[str] = set()
        failure: Retry | None = None
        while len(tried) < context.settings.max_attempts:
            route = context.view.table.find(self._name)
            lease = (
                context.balancer.acquire(route.ready, tried, self._prompt)
                if route is not None and route.model.uid == self.model.uid
                else None
            )
            if lease is None:
                if failure is None:
                    states = route.states() if route is not None else "it was deleted"
                    raise no_ready_replica(self._name, states, context.settings.retry_after_seconds)
                break
            if failure is not None:
                context.metrics.retries.labels(failure.reason).inc()
            self._lease = lease
            tried.add(lease.replica.pod_uid)
            try:
                failure = await self._attempt(lease.replica)
            finally:
                lease.release(self._tpot_ms())
            if failure is None:
                return
        if failure is not None and failure.unavailable:
            raise no_ready_replica(self._name, failure.detail, DRAIN_RETRY_AFTER_SECONDS)
        raise upstream_failed(self._name, len(tried), failure.detail if failure else "none tried")

    async def _attempt(self, replica: Replica) -> Retry | None:
        """None once the request is answered, well or badly."""
        context = self._context
        port = context.settings.engine_port
        connection: Connection | None = None
        try:
            head = request_head(
                self._scope["method"],
                self._scope["path"],
                f"{replica.host}:{port}",
                self._scope["headers"],
                self.request_id,
                len(self._body),
            )
            connection, answer = await context.upstream.request(replica.ip, port, head, self._body)
            if answer.status == 503 and answer.get(DRAINING) is not None:
                context.balancer.draining(replica)
                return Retry("draining", f"{replica.pod_name} is draining")
            if answer.status in (502, 503):
                context.balancer.failed(replica)
                return Retry("not_ready", f"{replica.pod_name} answered {answer.status}")
            if not 200 <= answer.status < 600:
                context.balancer.failed(replica)
                return Retry("garbage", f"{replica.pod_name} answered with status {answer.status}")
            if answer.content_type == EVENT_STREAM:
                await self._relay_stream(connection, answer, replica)
            else:
                await self._relay_whole(connection, answer, replica)
            context.balancer.succeeded(replica)
            return None
        except ReplicaError as error:
            context.balancer.failed(replica)
            if self._relaying:
                await self._break_off(f"{replica.pod_name} {error}")
                return None
            if isinstance(error, SilentError):
                raise upstream_timeout(self._name, context.settings.upstream_idle_seconds) from error
            return Retry(error.reason, f"{replica.pod_name}: {error}")
        finally:
            if connection is not None:
                context.upstream.release(replica.ip, port, connection)

    async def _relay_stream(self, connection: Connection, answer: Head, replica: Replica) -> None:
        """The status goes out with the first byte of the body: until then another replica can take over."""
        clock, counter = self._context.clock, self._counter
        chunk = await connection.read()
        await self._begin(answer, replica)
        while chunk:
            waiting = counter.first_token_time is None
            counter.feed(chunk, clock())
            if waiting and counter.first_token_time is not None and self._lease is not None:
                self._lease.first_token()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await connection.read()
        if not counter.done and not counter.failed and answer.status < 400:
            await self._break_off(f"{replica.pod_name} ended it without [DONE]")
            return
        self._outcome = Outcome.INTERRUPTED if counter.failed else outcome_of_status(answer.status)
        await self._send({"type": "http.response.body", "body": b""})

    async def _relay_whole(self, connection: Connection, answer: Head, replica: Replica) -> None:
        held: list[bytes] = []
        size = 0
        while size <= HOLD_BYTES and (chunk := await connection.read()):
            held.append(chunk)
            size += len(chunk)
        body = b"".join(held)
        self._counter.read_usage(body)
        if self.status is not None:
            # The stream was begun while the request was held: what the replica says instead of a stream is an event of it.
            self._outcome = outcome_of_status(answer.status)
            await self._event(body.replace(b"\n", b" "))
            return
        if size <= HOLD_BYTES:
            self._outcome = outcome_of_status(answer.status)
            await self._begin(answer, replica, b"%d" % len(body))
            await self._send({"type": "http.response.body", "body": body})
            return
        await self._begin(answer, replica, answer.get(b"content-length"))
        while body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = await connection.read()
        self._outcome = outcome_of_status(answer.status)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, answer: Head, replica: Replica, length: bytes | None = None) -> None:
        self._relaying = True
        self.replica = replica.pod_name
        if self.status is not None:
            return
        headers = response_headers(answer, self.request_id, replica.pod_name)
        self._streams = answer.content_type == EVENT_STREAM
        if length is not None:
            headers.append((b"content-length", length))
        headers.extend(self._context.extra_headers())
        self.status = answer.status
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _beat(self) -> None:
        """Begin the answer of a held stream, or keep it alive."""
        if self.status is None:
            self.status = 200
            headers = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache"), (REQUEST_ID, self.request_id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._context.extra_headers()]})
        await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})

    async def _event(self, data: bytes) -> None:
        """End a stream that was begun with one event."""
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n"})

    async def _send(self, message: Message) -> None:
        self.sending_since = self._context.clock()
        await self._send_raw(message)
        self.sending_since = None

    async def _break_off(self, reason: str) -> None:
        self._outcome = Outcome.INTERRUPTED
        self.reason = reason
        await self._end_early(reason)

    async def _end_early(self, reason: str) -> None:
        """Tell the client of a stream in the stream. Any other answer is left incomplete: the server then closes the connection."""
        if not self._streams or self.status is None:
            return
        if not self._counter.at_boundary:
            await self._send({"type": "http.response.body", "body": b"\n\n", "more_body": True})
        await self._event(interrupted(self._name, reason).body())
