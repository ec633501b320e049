"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse

from npufleet_api.contract import DRAINING_CODE, DRAINING_HEADER
from npufleet_pod.errors import (
    BodyTooLargeError,
    ContextLengthError,
    DeadlineError,
    DrainDeadlineError,
    GenerationError,
    GrammarError,
    HandedBackError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    QueueFullError,
    RequestError,
)

RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """One error, ready to be sent as a response or as an event of a stream."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


_KINDS: tuple[tuple[type[RequestError], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (BodyTooLargeError, 413, "invalid_request_error", "body_too_large"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (NotReadyError, 503, "service_unavailable_error", "not_ready"),
    (HandedBackError, 503, "service_unavailable_error", DRAINING_CODE),
    (DrainDeadlineError, 503, "service_unavailable_error", "drain_deadline"),
    (DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    (GrammarError, 400, "invalid_request_error", "grammar_error"),
    (GenerationError, 500, "server_error", "engine_error"),
)


def answer_for(error: RequestError) -> ErrorAnswer:
    """The answer to a request that is not served."""
    status, kind, code = next((status, kind, code) for cls, status, kind, code in _KINDS if isinstance(error, cls))
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    if isinstance(error, HandedBackError) or (isinstance(error, NotReadyError) and error.draining):
        headers[DRAINING_HEADER] = "true"
        code = DRAINING_CODE
    return ErrorAnswer(status, error.message, kind, error.param, code, headers)


INTERNAL_ERROR = ErrorAnswer(500, "the server met an error of its own: its log has the request id", "server_error", code="internal_error")
