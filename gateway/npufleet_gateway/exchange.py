"""One request on its way: attempts on replicas, the relay of the answer, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from npufleet_api.slo import Exchange, Outcome, outcome_of_status, tpot_ms
from npufleet_gateway.access_log import AccessLog
from npufleet_gateway.admission import Admission
from npufleet_gateway.asgi import ClientWatch, Headers, Message, Scope, Send, send_error
from npufleet_gateway.attempt import Answer, Retry, Sender, race
from npufleet_gateway.balancer import Balancer, Lease
from npufleet_gateway.entrance import Admitted, Entrance
from npufleet_gateway.errors import (
    ApiError,
    Refusal,
    ReplicaError,
    interrupted,
    no_ready_replica,
    shutting_down,
    upstream_failed,
    upstream_timeout,
)
from npufleet_gateway.hedging import HedgeResult, Hedges
from npufleet_gateway.hold import HEARTBEAT, Holder
from npufleet_gateway.metrics import Metrics
from npufleet_gateway.prompt import NO_PROMPT, Prompt
from npufleet_gateway.routing import Model, Replica
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.sse import TokenCounter
from npufleet_gateway.upstream import REQUEST_ID, Upstream, response_headers
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
    hedges: Hedges | None = None
    access_log: AccessLog | None = None
    leaving: bool = False
    """Once set, answers ask clients to close their connections and come back by another gateway."""

    def extra_headers(self) -> Headers:
        """Headers of every answer."""
        return [(b"connection", b"close")] if self.leaving else []


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
        self._send_raw = send
        self.admitted = admitted
        self._name = name
        self.model = model
        self.request_id = request_id
        self._arrived = arrived
        self._prompt = prompt
        self._sender = Sender(context.upstream, context.balancer, context.settings.engine_port, scope, admitted.body, request_id)
        self._leases: list[Lease] = []
        """Of this attempt; two where a copy was sent."""
        self._answering: Lease | None = None
        self.hedge: HedgeResult | None = None
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
            lease = self._lease_of(context.balancer.acquire, tried)
            if lease is None:
                if failure is None:
                    route = context.view.table.find(self._name)
                    states = route.states() if route is not None else "it was deleted"
                    raise no_ready_replica(self._name, states, context.settings.retry_after_seconds)
                break
            if failure is not None:
                context.metrics.retries.labels(failure.reason).inc()
            try:
                answer = await self._ask(lease, tried)
                failure = answer if isinstance(answer, Retry) else await self._relay(answer)
            finally:
                for one in self._leases:
                    one.release(self._tpot_ms() if one is self._answering else None)
                self._leases.clear()
            if failure is None:
                return
            if failure.final:
                raise upstream_timeout(self._name, context.settings.upstream_idle_seconds)
        if failure is not None and failure.unavailable:
            raise no_ready_replica(self._name, failure.detail, DRAIN_RETRY_AFTER_SECONDS)
        raise upstream_failed(self._name, len(tried), failure.detail if failure else "none tried")

    def _lease_of(self, acquire: Callable[[Iterable[Replica], set[str], Prompt], Lease | None], tried: set[str]) -> Lease | None:
        """A replica that was not tried yet, by one of the balancer's methods; None where there is none, or the model is gone."""
        route = self._context.view.table.find(self._name)
        lease = acquire(route.ready, tried, self._prompt) if route is not None and route.model.uid == self.model.uid else None
        if lease is not None:
            self._leases.append(lease)
            tried.add(lease.replica.pod_uid)
        return lease

    async def _ask(self, lease: Lease, tried: set[str]) -> Answer | Retry:
        hedges = self._context.hedges
        beat = self._beat if self._streams else None
        if hedges is None or not self._streams or len(tried) > 1 or self._prompt.session is not None:
            return await self._sender.open(lease, beat)
        clock, key = self._context.clock, self.model.key
        began, delay = clock(), hedges.asked(key)
        if delay is None:
            answer = await self._sender.open(lease, beat)
        else:
            answer = await race(self._sender, lease, delay, lambda: self._copy(hedges, tried), self._beat)
        if isinstance(answer, Answer) and answer.head.content_type == EVENT_STREAM:
            hedges.began(key, clock() - began)
        if len(self._leases) > 1:
            won = isinstance(answer, Answer) and answer.lease is not lease
            self._note_hedge(HedgeResult.WON if won else HedgeResult.LOST)
        if isinstance(answer, Answer):
            for one in self._leases:
                if one is not answer.lease:
                    # Its replica was let go: it holds nothing there.
                    one.release()
        return answer

    def _copy(self, hedges: Hedges, tried: set[str]) -> Lease | None:
        """The replica that gets a copy of a stream that is late."""
        context = self._context
        if not context.admission.has_room(self.model.key):
            self._note_hedge(HedgeResult.BUSY)
        elif not hedges.take(self.model.key):
            self._note_hedge(HedgeResult.OVER_BUDGET)
        elif (lease := self._lease_of(context.balancer.acquire_spare, tried)) is None:
            hedges.give_back(self.model.key)
            self._note_hedge(HedgeResult.NO_REPLICA)
        else:
            return lease
        return None

    def _note_hedge(self, result: HedgeResult) -> None:
        self.hedge = result
        self._context.metrics.hedged(self.model.key, self.admitted.classification.name, result)

    async def _relay(self, answer: Answer) -> Retry | None:
        """None once the request is answered, well or badly."""
        self._answering = answer.lease
        replica = answer.lease.replica
        try:
            if answer.head.content_type == EVENT_STREAM:
                await self._relay_stream(answer)
            else:
                await self._relay_whole(answer)
            self._context.balancer.succeeded(replica)
            return None
        except ReplicaError as error:
            failure = self._sender.failed(answer.lease, error)
            if not self._relaying:
                return failure
            await self._break_off(f"{replica.pod_name} {error}")
            return None
        finally:
            self._sender.release(answer)

    async def _relay_stream(self, answer: Answer) -> None:
        """The status goes out with the first byte of the body: until then another replica can take over."""
        clock, counter, connection = self._context.clock, self._counter, answer.connection
        chunk = answer.first
        await self._begin(answer)
        while chunk:
            waiting = counter.first_token_time is None
            counter.feed(chunk, clock())
            if waiting and counter.first_token_time is not None:
                answer.lease.first_token()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            chunk = await connection.read()
        status = answer.head.status
        if not counter.done and not counter.failed and status < 400:
            await self._break_off(f"{answer.lease.replica.pod_name} ended it without [DONE]")
            return
        self._outcome = Outcome.INTERRUPTED if counter.failed else outcome_of_status(status)
        await self._send({"type": "http.response.body", "body": b""})

    async def _relay_whole(self, answer: Answer) -> None:
        connection, status = answer.connection, answer.head.status
        held: list[bytes] = []
        size = 0
        chunk = answer.first
        while chunk:
            held.append(chunk)
            size += len(chunk)
            if size > HOLD_BYTES:
                break
            chunk = await connection.read()
        body = b"".join(held)
        self._counter.read_usage(body)
        if self.status is not None:
            # The stream was begun while the request was held: what the replica says instead of a stream is an event of it.
            self._outcome = outcome_of_status(status)
            await self._event(body.replace(b"\n", b" "))
            return
        if size <= HOLD_BYTES:
            self._outcome = outcome_of_status(status)
            await self._begin(answer, b"%d" % len(body))
            await self._send({"type": "http.response.body", "body": body})
            return
        await self._begin(answer, answer.head.get(b"content-length"))
        while body:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            body = await connection.read()
        self._outcome = outcome_of_status(status)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, answer: Answer, length: bytes | None = None) -> None:
        self._relaying = True
        self.replica = answer.lease.replica.pod_name
        if self.status is not None:
            return
        head = answer.head
        headers = response_headers(head, self.request_id, self.replica)
        self._streams = head.content_type == EVENT_STREAM
        if length is not None:
            headers.append((b"content-length", length))
        headers.extend(self._context.extra_headers())
        self.status = head.status
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

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
