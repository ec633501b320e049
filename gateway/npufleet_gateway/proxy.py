"""The hot path: from a client's request to a replica and back. Raw ASGI, so that a chunk costs one read, one count and one send."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_api.accounting import Accounting
from npufleet_api.contract import SESSION_HEADER
from npufleet_api.slo import FAILURES, Exchange
from npufleet_gateway.asgi import CLIENT, ClientLeftError, ClientWatch, Headers, Receive, Scope, Send, read_body, send_error
from npufleet_gateway.entrance import Asked
from npufleet_gateway.errors import ApiError, bad_request, internal_error, model_not_found
from npufleet_gateway.exchange import Context, LiveExchange
from npufleet_gateway.keys import ApiKey
from npufleet_gateway.prompt import Prompt
from npufleet_gateway.routing import ModelRoute, adapter_of
from npufleet_gateway.upstream import request_id_of

logger = logging.getLogger(__name__)

PROXIED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"})
SWEEP_SECONDS = 5.0
MAX_PROMPT_BODY_BYTES = 1024 * 1024
"""The prompt of a larger body is not read for routing: a million small objects in it would hold up every other request."""
SESSION_HEADER_BYTES = SESSION_HEADER.encode()


class RequestHead(BaseModel):
    """What the gateway reads of a body. The rest is checked as JSON, but never turned into Python objects."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str = Field(min_length=1, max_length=512)
    stream: Any = None
    prompt_cache_key: Any = None
    cache_salt: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None

    @property
    def asked(self) -> Asked:
        """What the entrance judges."""
        return Asked(self.max_tokens, self.max_completion_tokens, self.priority, self.stream is True)


class PromptHead(RequestHead):
    """With what routing needs of the prompt."""

    messages: Any = None
    prompt: Any = None
    tools: Any = None


class Proxy:
    """ASGI application of the proxied routes."""

    def __init__(self, context: Context, accounting: Accounting) -> None:
        self._context = context
        self._accounting = accounting
        self._live: set[LiveExchange] = set()

    @property
    def live(self) -> int:
        """Requests in flight."""
        return len(self._live)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        context = self._context
        arrived = context.clock()
        request_id = request_id_of(scope["headers"])
        key: ApiKey | None = None
        try:
            key = context.entrance.identify(scope["headers"])
            body = await read_body(receive, context.settings.max_body_bytes, context.settings.body_timeout_seconds)
            head = parse_head(body)
            route = context.view.table.find(head.model)
            if route is None:
                raise model_not_found(head.model)
            admitted = context.entrance.enter(key, route, scope["headers"], head.asked, body)
        except ClientLeftError:
            return
        except ApiError as error:
            context.metrics.rejected.labels(str(error.status), error.cause).inc()
            await send_error(send, error, request_id, context.extra_headers())
            _access_refused(context, scope, request_id, key, error, arrived)
            return
        prompt = read_prompt(head, scope["headers"], route, len(body))
        live = LiveExchange(
            context, scope, send, admitted, head.model, route.model, request_id, arrived, prompt, streams=head.stream is True
        )
        model = route.model
        tally = self._accounting.started(
            model.key,
            admitted.classification.name,
            model.slo,
            arrived=arrived,
            first_token=live.first_token_time if head.stream is True else None,
        )
        self._live.add(live)
        try:
            async with ClientWatch(scope[CLIENT]) as watch:
                live.watch = watch
                await live.run()
        except Exception:  # a fault of ours must reach the client as an answer, and the log with its cause
            logger.exception("request %s failed", request_id)
            if live.status is None:
                await send_error(send, internal_error(), request_id, context.extra_headers())
        finally:
            self._live.discard(live)
            exchange = live.result()
            judgement = self._accounting.finished(tally, exchange)
            context.metrics.finished(model.key, tally.workload_class, exchange, judgement)
            context.entrance.spend(key, live.tokens)
            _log(live, exchange)
            _access(context, scope, live, exchange)

    async def cut_off_stalled_clients(self) -> None:
        """Cut off clients that do not read their streams. Runs until cancelled."""
        settings = self._context.settings
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, settings.client_stall_seconds / 2))
            oldest = self._context.clock() - settings.client_stall_seconds
            for live in list(self._live):
                if live.sending_since is not None and live.sending_since < oldest and live.watch is not None:
                    logger.warning("request %s: its client read nothing for %g s", live.request_id, settings.client_stall_seconds)
                    live.watch.stop()


def parse_head(body: bytes) -> RequestHead:
    """Model and stream of a body. Raises ApiError (400)."""
    try:
        return (PromptHead if len(body) <= MAX_PROMPT_BODY_BYTES else RequestHead).model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        raise bad_request(f"The request body is not valid JSON: {first['ctx']['error']}.")
    if first["type"] == "missing":
        raise bad_request("You must provide a model: GET /v1/models lists them.", "model")
    if not first["loc"]:
        raise bad_request("The request body is not a JSON object.")
    raise bad_request(f"model: {first['msg']}.", "model")


def read_prompt(head: RequestHead, headers: Headers, route: ModelRoute, body_bytes: int) -> Prompt:
    """What routing needs of the prompt."""
    session = next((value.decode("latin-1") for name, value in headers if name == SESSION_HEADER_BYTES), "")
    if not session and isinstance(head.prompt_cache_key, str):
        session = head.prompt_cache_key
    known = head if isinstance(head, PromptHead) else None
    return Prompt.read(
        route.model.qualified_name,
        messages=known.messages if known else None,
        prompt=known.prompt if known else None,
        tools=known.tools if known else None,
        salt=head.cache_salt if isinstance(head.cache_salt, str) else "",
        adapter=adapter_of(head.model, route),
        session=session,
        body_bytes=body_bytes,
        streams=head.stream is True,
    )


def _access(context: Context, scope: Scope, live: LiveExchange, exchange: Exchange) -> None:
    if context.access_log is None:
        return
    admitted = live.admitted
    context.access_log.write(
        request_id=live.request_id,
        path=scope["path"],
        key=admitted.key.name if admitted.key is not None else None,
        model=live.model.qualified_name,
        workload_class=admitted.classification.name,
        class_source=admitted.classification.source.value,
        replica=live.replica,
        status=live.status,
        outcome=exchange.outcome.value,
        streamed=exchange.streamed,
        queued_ms=round(live.queued_ms, 1),
        ttft_ms=None if exchange.ttft_ms is None else round(exchange.ttft_ms, 1),
        duration_ms=round(exchange.elapsed_ms, 1),
        request_bytes=len(admitted.body),
        answer_tokens=live.answer_tokens,
        hedge=live.hedge,
    )


def _access_refused(context: Context, scope: Scope, request_id: str, key: ApiKey | None, error: ApiError, arrived: float) -> None:
    if context.access_log is not None:
        context.access_log.write(
            request_id=request_id,
            path=scope["path"],
            key=key.name if key is not None else None,
            status=error.status,
            error=error.code,
            duration_ms=round((context.clock() - arrived) * 1000, 1),
        )


def _log(live: LiveExchange, exchange: Exchange) -> None:
    if exchange.outcome in FAILURES:
        logger.warning(
            "request %s for %s: %s after %.0f ms (%s)",
            live.request_id,
            live.model.qualified_name,
            exchange.outcome.value,
            exchange.elapsed_ms,
            live.reason or f"status {live.status}",
        )
