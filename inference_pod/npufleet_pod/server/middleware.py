"""What every request of the OpenAI port gets: an id, the replica's name, one line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, MODEL_LOADED_HEADER, READY_PATH, REPLICA_HEADER, REQUEST_ID_HEADER
from npufleet_pod.server.errors import INTERNAL_ERROR
from npufleet_pod.server.metrics import EngineMetrics
from npufleet_pod.server.tracing import Tracing

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
TRACE_STATE = "trace"
"""Where a response leaves what a span is to tell of its generation."""
QUIET_PATHS = {HEALTH_PATH, READY_PATH, METRICS_PATH}


class RequestContextMiddleware:
    """Pure ASGI, so that it neither buffers streams nor hides a client's departure."""

    def __init__(
        self,
        app: ASGIApp,
        replica: str,
        model_header: str,
        metrics: EngineMetrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """metrics, tracing: told of each request that ends."""
        self._app = app
        self._replica = replica
        self._model_header = model_header
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer what nobody caught with an error object."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = Headers(scope=scope)
        given = received.get(REQUEST_ID_HEADER, "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                headers[REPLICA_HEADER] = self._replica
                headers[MODEL_LOADED_HEADER] = self._model_header
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request failed", extra={"request_id": request_id, "path": scope["path"]})
            if status == 0:
                await INTERNAL_ERROR.response()(scope, receive, send_with_headers)
        finally:
            if scope["path"] not in QUIET_PATHS:
                seconds = time.monotonic() - started
                state = scope["state"]
                fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status}
                key = {"api_key": state["api_key"]} if "api_key" in state else {}
                logger.info("request", extra={**fields, "seconds": round(seconds, 4), **key})
                # The route's own path, where there is one: clients' paths would make metrics without bound.
                path = getattr(scope.get("route"), "path", "none")
                if self._metrics is not None:
                    self._metrics.on_http_request(path, scope["method"], status, seconds)
                if self._tracing is not None:
                    self._tracing.request(received, request_id, path, status, seconds, state.get(TRACE_STATE, {}))
