"""Errors of the operator.

OperatorError
├── ApiError            the API server refused or could not be reached
│   ├── NotFoundError       404
│   ├── ConflictError       409: someone else was first, or the object is another one by now
│   ├── RefusedError        400, 403, 422: the object itself is refused
│   └── UnavailableError    no answer, 429 or 5xx
├── AdminError          an engine's admin port did not answer as agreed
└── InputError          a file or line that someone gave cannot be used; the message names file, field, value and remedy
    └── RecordingError      a recorded plan
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of all errors of the operator."""


class ApiError(OperatorError):
    """A request to the API server that did not succeed."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(ApiError):
    """The object is gone."""


class ConflictError(ApiError):
    """Observe again: the object changed, exists already, or is another one by now."""


class RefusedError(ApiError):
    """The object as it is will not be taken; the message is the API server's."""


class UnavailableError(ApiError):
    """The API server does not answer now."""


class AdminError(OperatorError):
    """An engine's admin port could not be reached or did not answer as agreed."""


class InputError(OperatorError):
    """What someone gave cannot be used; the message names file, field, value and remedy."""


class RecordingError(InputError):
    """A recorded line that cannot be planned again; the message names the field."""


def api_error(status: int, message: str) -> ApiError:
    """The error that stands for an HTTP status of the API server."""
    if status == 404:
        return NotFoundError(message, status)
    if status in (409, 410):
        return ConflictError(message, status)
    if status in (400, 401, 403, 422):
        return RefusedError(message, status)
    return UnavailableError(message, status)
