"""Errors of the gateway.

GatewayError
├── ConfigurationError   the process cannot start
├── ObjectError          an object of the API server cannot be used
├── WatchError           a list or watch failed and is tried again
│   └── WatchExpiredError  the resourceVersion is too old: list again
├── ReplicaError         a replica did not answer as it should
│   ├── UnreachableError   no connection to it
│   ├── ResetError         it closed the connection in the middle
│   ├── GarbageError       what it sent is not HTTP
│   └── SilentError        it sent nothing for too long
└── ApiError             an answer to a client, as an OpenAI error object
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from enum import StrEnum


class GatewayError(Exception):
    """Base of the gateway's errors."""


class ConfigurationError(GatewayError):
    """The process cannot start; the message names the setting and the remedy."""


class ObjectError(GatewayError):
    """An object of the API server cannot be used; the message names the object, the field and why."""


class WatchError(GatewayError):
    """A list or watch failed."""


class WatchExpiredError(WatchError):
    """The resourceVersion is too old."""


class ReplicaError(GatewayError):
    """A replica did not answer as it should; `reason` is a metric label."""

    reason = "failed"


class UnreachableError(ReplicaError):
    """No connection to the replica: nothing was sent."""

    reason = "refused"


class ResetError(ReplicaError):
    """The replica closed the connection before its answer was complete."""

    reason = "reset"


class GarbageError(ReplicaError):
    """The replica sent what is not HTTP."""

    reason = "garbage"


class SilentError(ReplicaError):
    """The replica sent nothing for too long."""

    reason = "silent"


class Refusal(StrEnum):
    """Why a request for a known model reached no replica; a metric label."""

    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    """Its class's queue is longer than its deadline allows."""
    DEADLINE_PASSED = "deadline_passed"
    """It waited until its deadline."""
    HOLD_FULL = "hold_full"
    NO_REPLICA = "no_replica"
    """It was held for a first replica until `hold_seconds`."""
    CLIENT_LEFT = "client_left"


class ApiError(GatewayError):
    """An answer to a client.

    `kind` is OpenAI's `type`, `code` its machine-readable code; `retry_after_seconds` becomes a Retry-After header. `refusal` says why a
    request that has a model was not let through to its replicas.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.refusal = refusal

    @property
    def cause(self) -> str:
        """A metric label: the code, or `bad_request` where OpenAI has none."""
        return self.code or "bad_request"

    def body(self) -> bytes:
        """The OpenAI error object as JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request is malformed."""
    return ApiError(400, "invalid_request_error", None, message, param=param)


def not_found(path: str) -> ApiError:
    """404: no such route."""
    return ApiError(404, "invalid_request_error", "unknown_url", f"Unknown request URL: {path}. Check the path and the method.")


def tls_required(port: int) -> ApiError:
    """403: a client on the plain port of a gateway that serves clients with TLS alone. Its key may have been read on the way."""
    return ApiError(
        403,
        "invalid_request_error",
        "tls_required",
        f"This gateway serves clients with TLS alone: use https and port {port}. An API key that was sent without it should be replaced.",
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body is larger than the gateway reads."""
    return ApiError(
        413, "invalid_request_error", "request_too_large", f"The request body is larger than {limit_bytes} bytes: send a shorter prompt."
    )


def model_not_found(name: str) -> ApiError:
    """404: no model of that name in the pool."""
    return ApiError(
        404,
        "invalid_request_error",
        "model_not_found",
        f"The model {name[:256]!r} does not exist: GET /v1/models lists them.",
        param="model",
    )


def no_ready_replica(model: str, states: str, retry_after_seconds: int, refusal: Refusal | None = None) -> ApiError:
    """503: the model exists, but nothing can serve it now."""
    return ApiError(
        503,
        "service_unavailable",
        "no_ready_replica",
        f"The model {model!r} has no ready replica ({states}): try again in {retry_after_seconds} seconds.",
        retry_after_seconds=retry_after_seconds,
        refusal=refusal,
    )


def overloaded(model: str, class_name: str, refusal: Refusal, reason: str, retry_after_seconds: int) -> ApiError:
    """429: the model's replicas have no room for the request; not a limit of the client's."""
    return ApiError(
        429,
        "service_unavailable",
        "capacity_exceeded",
        f"The model {model!r} has no capacity left for class {class_name!r}: {reason}. Try again in {retry_after_seconds} seconds.",
        retry_after_seconds=retry_after_seconds,
        refusal=refusal,
    )


def missing_key() -> ApiError:
    """401: the pool asks for API keys, and the request has none."""
    return ApiError(
        401, "invalid_request_error", "missing_api_key", "No API key: send it as Authorization: Bearer KEY, or in the header api-key."
    )


def invalid_key() -> ApiError:
    """401: no such key."""
    return ApiError(401, "invalid_request_error", "invalid_api_key", "The API key is not valid: ask the pool's owner for one.")


def rate_limited(what: str, per_minute: int, wait_seconds: float) -> ApiError:
    """429: the key's own limit."""
    seconds = max(1, min(60, math.ceil(wait_seconds)))
    return ApiError(
        429,
        what,
        "rate_limit_exceeded",
        f"The limit of this API key, {per_minute} {what} per minute, is reached: try again in {seconds} seconds.",
        retry_after_seconds=seconds,
    )


def too_many_held(model: str, held: int, retry_after_seconds: int) -> ApiError:
    """429: too many requests wait for the model's first replica."""
    return ApiError(
        429,
        "service_unavailable",
        "capacity_exceeded",
        f"{held} requests wait already for a first replica of {model!r}: try again in {retry_after_seconds} seconds.",
        retry_after_seconds=retry_after_seconds,
        refusal=Refusal.HOLD_FULL,
    )


def held_too_long(model: str, seconds: float, states: str, retry_after_seconds: int) -> ApiError:
    """503: no replica turned ready while the request was held."""
    return ApiError(
        503,
        "service_unavailable",
        "no_ready_replica",
        f"The model {model!r} had no ready replica for {seconds:g} seconds ({states}): try again in {retry_after_seconds} seconds.",
        retry_after_seconds=retry_after_seconds,
        refusal=Refusal.NO_REPLICA,
    )


def unknown_class(name: str, known: Iterable[str]) -> ApiError:
    """400: the header names no class of the pool."""
    return ApiError(
        400,
        "invalid_request_error",
        "unknown_class",
        f"x-npufleet-class: the pool has no class {name[:64]!r}, but {', '.join(sorted(known))}.",
    )


def class_not_allowed(name: str) -> ApiError:
    """403: the class may not be claimed by this request."""
    return ApiError(
        403,
        "permission_error",
        "class_not_allowed",
        f"x-npufleet-class: the class {name[:64]!r} may not be claimed: leave the header out, or use an API key that lists the class.",
    )


def upstream_failed(model: str, attempts: int, reason: str) -> ApiError:
    """502: every replica that was tried failed before it answered."""
    return ApiError(502, "server_error", "replica_failed", f"No replica of {model!r} answered ({attempts} tried; the last: {reason}).")


def upstream_timeout(model: str, seconds: float) -> ApiError:
    """504: a replica accepted the request and then sent nothing."""
    return ApiError(504, "server_error", "replica_timeout", f"A replica of {model!r} sent nothing for {seconds:g} seconds.")


def interrupted(model: str, reason: str) -> ApiError:
    """The stream ends before it is complete; sent as an SSE event, since the status has already gone out."""
    return ApiError(502, "server_error", "stream_interrupted", f"The replica of {model!r} ended the stream early: {reason}.")


def shutting_down() -> ApiError:
    """503: the gateway ends and its grace is over."""
    return ApiError(503, "service_unavailable", "shutting_down", "The gateway is shutting down: try again.", retry_after_seconds=1)


def internal_error() -> ApiError:
    """500: a fault of the gateway; the log has the request id and the cause."""
    return ApiError(500, "server_error", "internal_error", "The gateway failed: report the x-request-id of this answer.")
