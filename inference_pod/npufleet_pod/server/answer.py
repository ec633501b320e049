"""Runs the sequences of one request and sends the answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from npufleet_api.contract import TIMEOUT_HEADER
from npufleet_pod.engine.generation import Generation
from npufleet_pod.engine.request import GenerationRequest, TokenOutput
from npufleet_pod.errors import DeadlineError, RequestError
from npufleet_pod.server.delta import Delta
from npufleet_pod.server.echo import Echo
from npufleet_pod.server.errors import INTERNAL_ERROR, answer_for
from npufleet_pod.server.extras import AnswerExtras
from npufleet_pod.server.logprobs import ScoredToken
from npufleet_pod.server.message import MessageFormat
from npufleet_pod.server.middleware import TRACE_STATE
from npufleet_pod.server.progress import Piece, Progress
from npufleet_pod.server.serving import Serving
from npufleet_pod.server.wording import Choice, Ending, Usage, Wording

logger = logging.getLogger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
"""A comment, which clients skip: it keeps proxies from taking a silent stream for dead."""
LAST_EVENT_SECONDS = 5
"""Time in which a client takes the event that tells why its stream ended early."""
INLINE_SCORED_TOKENS = 1024
"""Log probabilities of more tokens are written out on a thread, so that other clients' tokens are not held up."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is to be generated, and how the answer is sent."""

    requests: tuple[GenerationRequest, ...]
    wording: Wording
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echoes: tuple[Echo, ...] = ()
    """What precedes each answer: one per request, or none."""
    prompt_only: bool = False
    """Whether the answers end with the echo."""
    message: MessageFormat | None = None
    """How a chat's answers are read; None: they are text."""
    token_ids: bool = False
    """Whether token ids of prompt and answer are told."""
    prompt_logprobs: int | None = None
    """How many alternatives each token of the prompt is told with; None: its scores are not told."""
    choices: int = 1
    """n of the request."""


class GenerationResponse(Response):
    """Admits, submits and answers in one go, so that a request is either refused before anything was done or counted to its last byte.

    Headers are sent with the first token: until then a failure is still a status of its own, and a gateway may try elsewhere. Only a stream
    that would be silent for too long begins earlier, with a comment.
    """

    def __init__(self, serving: Serving, plan: AnswerPlan, deadline: float | None = None) -> None:
        """deadline: when the client no longer waits, in the event loop's time."""
        super().__init__()
        self._serving = serving
        self._plan = plan
        self._deadline = deadline
        self._progress = Progress(plan.requests, plan.echoes, plan.prompt_only, plan.message)
        self._extras = AnswerExtras(plan.requests, plan.wording, plan.token_ids, plan.prompt_logprobs, plan.prompt_only)
        self._worded: set[int] = set()
        """Choices of which a chunk was sent."""
        self._begun = False
        """Whether headers were sent, or are being sent."""
        self._first_token_at: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever is left of the generation is cancelled when the client leaves."""
        started = time.monotonic()
        try:
            async with within(self._deadline):
                with self._serving.lifecycle.admit(), self._serving.engine.submit(self._plan.requests) as generation:
                    self._serving.metrics.on_submit(self._plan.choices)
                    answer = self._stream(generation, send) if self._plan.stream else self._whole(generation, scope, receive, send)
                    if not await run_until_disconnect(receive, answer):
                        logger.info("client left", extra={"request_id": scope.get("state", {}).get("request_id")})
        except RequestError as error:
            if self._begun and self._plan.stream:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_EVENT_SECONDS):
                        await _send_last(send, answer_for(error).body())
            elif not self._begun:
                await answer_for(error).response()(scope, receive, send)
        finally:
            scope.setdefault("state", {})[TRACE_STATE] = self._trace(started)

    def _trace(self, started: float) -> dict[str, Any]:
        """What a span tells of the generation. started: time.monotonic() of its begin."""
        told: dict[str, Any] = {
            "gen_ai.usage.prompt_tokens": self._plan.prompt_tokens,
            "gen_ai.usage.completion_tokens": self._progress.tokens,
            "gen_ai.request.n": self._plan.choices,
            "gen_ai.request.max_tokens": self._plan.requests[0].stop.max_tokens,
        }
        if self._first_token_at is not None:
            told["gen_ai.latency.time_to_first_token"] = self._first_token_at - started
        return told

    async def _whole(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        plan, progress = self._plan, self._progress
        scored = [request.logprobs is not None for request in plan.requests]
        deltas: list[list[Delta]] = [[] for _ in scored]
        tokens: list[list[ScoredToken]] = [[] for _ in scored]
        endings: dict[int, Ending] = {}
        while not generation.finished:
            index, output = await generation.next()
            piece = self._take(index, output)
            deltas[index].append(piece.delta)
            tokens[index] += piece.scored
            if piece.ending is not None:
                endings[index] = piece.ending
        choices = [Choice(endings[i], deltas[i], tokens[i] if scored[i] else None) for i in range(len(scored))]
        usage = Usage(plan.prompt_tokens, progress.tokens)

        def word() -> Response:
            return JSONResponse(self._extras.added_to(plan.wording.whole(choices, usage)))

        many = sum(map(len, tokens)) + self._extras.scored_tokens > INLINE_SCORED_TOKENS
        answer = await asyncio.to_thread(word) if many else word()
        self._begun = True
        await answer(scope, receive, send)

    async def _stream(self, generation: Generation, send: Send) -> None:
        first = await self._next(generation)
        self._begun = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        try:
            events = HEARTBEAT if first is None else await self._events(*first)
            while True:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                if generation.finished:
                    break
                output = await self._next(generation)
                events = HEARTBEAT if output is None else await self._events(*output)
            last = b""
            if self._plan.include_usage:
                last = self._event(self._plan.wording.usage_chunk(), self._usage())
            await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        except RequestError as error:
            await _send_last(send, answer_for(error).body())
        except Exception:
            logger.exception("stream failed")
            await _send_last(send, INTERNAL_ERROR.body())

    async def _next(self, generation: Generation) -> tuple[int, TokenOutput] | None:
        """The next token of any choice; None: there was none for the time of a heartbeat."""
        try:
            async with asyncio.timeout(self._serving.settings.heartbeat_seconds):
                return await generation.next()
        except TimeoutError:
            return None

    def _take(self, index: int, output: TokenOutput) -> Piece:
        """Note the next token of choice `index`."""
        piece = self._progress.take(index, output)
        self._first_token_at = self._first_token_at or time.monotonic()
        self._extras.take(index, output)
        return piece

    async def _events(self, index: int, output: TokenOutput) -> bytes:
        """The events that one token makes: none while its text is held back."""
        piece = self._take(index, output)
        if len(piece.scored) > INLINE_SCORED_TOKENS:
            return await asyncio.to_thread(self._word, index, piece)
        return self._word(index, piece)

    def _word(self, index: int, piece: Piece) -> bytes:
        wording, usage, events = self._plan.wording, self._usage() if self._plan.continuous_usage else None, b""
        scored = piece.scored
        if piece.delta:
            events = self._event(wording.delta_chunk(index, piece.delta, index not in self._worded, scored), usage)
            self._worded.add(index)
            scored = []
        if piece.ending is not None:
            events += self._event(wording.end_chunk(index, piece.ending, index not in self._worded, scored), usage)
        return events

    def _event(self, chunk: dict[str, Any], usage: Usage | None) -> bytes:
        if usage is not None:
            chunk["usage"] = usage.as_dict()
        elif self._plan.include_usage:
            chunk["usage"] = None
        return _sse(self._extras.added_to_chunk(chunk))

    def _usage(self) -> Usage:
        return Usage(self._plan.prompt_tokens, self._progress.tokens)


@contextlib.asynccontextmanager
async def within(deadline: float | None) -> AsyncIterator[None]:
    """Raise DeadlineError, wherever what is inside stands, once the event loop's time is `deadline`; None: never."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"the request took longer than its {TIMEOUT_HEADER} allows: give it more time", TIMEOUT_HEADER) from error


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends (True) or the client leaves (False; it is cancelled). The request's body must have been read."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
        if finished:
            await working
        return finished
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_last(send: Send, body: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": _sse(body), "more_body": False})


def _sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"
