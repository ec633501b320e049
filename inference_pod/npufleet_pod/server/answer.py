"""Runs the sequences of one request and sends the answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from npufleet_pod.engine.engine import Generation
from npufleet_pod.engine.request import GenerationRequest, TokenOutput
from npufleet_pod.errors import RequestError
from npufleet_pod.server.errors import INTERNAL_ERROR, answer_for
from npufleet_pod.server.serving import Serving
from npufleet_pod.server.wording import Ending, Usage, Wording

logger = logging.getLogger(__name__)

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is to be generated, and how the answer is sent."""

    requests: tuple[GenerationRequest, ...]
    wording: Wording
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(slots=True)
class _Choices:
    """What has been generated so far."""

    texts: list[list[str]]
    endings: list[Ending | None]
    tokens: int = 0
    begun: set[int] = field(default_factory=set)

    def add(self, index: int, output: TokenOutput) -> None:
        self.tokens += 1
        if output.finish_reason is not None:
            self.endings[index] = Ending(output.finish_reason, output.stop_reason)


class GenerationResponse(Response):
    """Admits, submits and answers in one go, so that a request is either refused before anything was done or counted to its last byte.

    Headers are sent with the first token: until then a failure is still a status of its own, and a gateway may try elsewhere.
    """

    def __init__(self, serving: Serving, plan: AnswerPlan) -> None:
        super().__init__()
        self._serving = serving
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever is left of the generation is cancelled when the client leaves."""
        try:
            with self._serving.lifecycle.admit(), self._serving.engine.submit(self._plan.requests) as generation:
                answer = self._stream(generation, send) if self._plan.stream else self._whole(generation, scope, receive, send)
                if not await run_until_disconnect(receive, answer):
                    logger.info("client left", extra={"request_id": scope.get("state", {}).get("request_id")})
        except RequestError as error:
            await answer_for(error).response()(scope, receive, send)

    async def _whole(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        choices = self._new_choices()
        while not generation.finished:
            index, output = await generation.next()
            choices.add(index, output)
            choices.texts[index].append(output.text)
        endings = [ending for ending in choices.endings if ending is not None]
        usage = Usage(self._plan.prompt_tokens, choices.tokens)
        body = self._plan.wording.whole(["".join(pieces) for pieces in choices.texts], endings, usage)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, generation: Generation, send: Send) -> None:
        choices = self._new_choices()
        events = self._events(choices, *await generation.next())
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        try:
            while True:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                if generation.finished:
                    break
                events = self._events(choices, *await generation.next())
            last = b""
            if self._plan.include_usage:
                last = self._event(self._plan.wording.usage_chunk(), Usage(self._plan.prompt_tokens, choices.tokens))
            await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        except RequestError as error:
            await _send_last(send, answer_for(error).body())
        except Exception:
            logger.exception("stream failed")
            await _send_last(send, INTERNAL_ERROR.body())

    def _events(self, choices: _Choices, index: int, output: TokenOutput) -> bytes:
        """The events that one token makes: none while its text is held back."""
        choices.add(index, output)
        usage = Usage(self._plan.prompt_tokens, choices.tokens) if self._plan.continuous_usage else None
        events = b""
        if output.text:
            events = self._event(self._plan.wording.text_chunk(index, output.text, index not in choices.begun), usage)
            choices.begun.add(index)
        ending = choices.endings[index]
        if ending is not None:
            events += self._event(self._plan.wording.end_chunk(index, ending), usage)
        return events

    def _event(self, chunk: dict[str, Any], usage: Usage | None) -> bytes:
        if usage is not None:
            chunk["usage"] = usage.as_dict()
        elif self._plan.include_usage:
            chunk["usage"] = None
        return _sse(chunk)

    def _new_choices(self) -> _Choices:
        count = len(self._plan.requests)
        return _Choices([[] for _ in range(count)], [None] * count)


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
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
