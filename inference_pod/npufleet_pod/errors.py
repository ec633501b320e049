"""Errors of the inference pod. Messages are one line and name the field, the value and the remedy."""

from __future__ import annotations

import re
from collections import Counter

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from npufleet_api.contract import EngineExit

MAX_VALUE_CHARS = 80
FIELD_NAME = re.compile(r"(?!(?:str|int|float|bool)$)[A-Za-z_]\w*")
"""Tells a field from the name that pydantic gives to one form of a field, such as `list[int]` or `str`."""


class PodError(Exception):
    """Base of every error that npufleet_pod raises on its own."""


class StartError(PodError):
    """The engine cannot start. Its message is the whole of what the process says on stderr, `exit_code` what it exits with."""

    exit_code = 1


class SettingsError(StartError):
    """The settings file is missing, unreadable or wrong."""

    exit_code = EngineExit.SETTINGS


class ModelError(StartError):
    """The model's files are missing, damaged or of a kind that is not served."""

    exit_code = EngineExit.MODEL


class DeviceError(StartError):
    """The device is absent, or too small for the model."""

    exit_code = EngineExit.DEVICE


class RankStartError(StartError):
    """A tensor-parallel rank other than 0 cannot start."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LoadCancelledError(PodError):
    """Loading was given up since the process ends."""


class TransferError(PodError):
    """KV could not be moved between memories: what the prefix cache says it holds may not be there. Ends the engine."""


class RankError(PodError):
    """A tensor-parallel rank died, failed or hangs; the others wait for it for ever. Ends the engine."""


class ExchangeError(PodError):
    """Data could not be exchanged with the other tensor-parallel ranks: usually since one of them has ended."""


class RequestError(PodError):
    """A request is not served. `param` names the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """The request can never be served as it is."""


class ContextLengthError(InvalidRequestError):
    """Prompt and answer are longer than the model, or the memory, holds."""


class ModelNotFoundError(RequestError):
    """The request names another model than the one that is served."""


class BodyTooLargeError(RequestError):
    """The request's body is longer than maxBodyBytes."""


class NotReadyError(RequestError):
    """New work is refused for now. Nothing was done: it can be sent elsewhere."""

    def __init__(self, message: str, *, draining: bool) -> None:
        super().__init__(message)
        self.draining = draining


class QueueFullError(RequestError):
    """Too many requests wait; later there may be room."""


class GenerationError(RequestError):
    """A generation that had begun was ended by the engine."""


class GrammarError(GenerationError):
    """An answer cannot go on under its grammar."""


class HandedBackError(GenerationError):
    """A request that waited on a draining replica was not begun. Nothing was done: it can be sent elsewhere."""


class DeadlineError(RequestError):
    """The time that the client gave the request is over."""


class DrainDeadlineError(GenerationError):
    """A generation was ended since the replica's drain ran out of time."""


def describe_validation_error(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: field, reason, value."""
    first = first_problem(error)
    field = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or FIELD_NAME.fullmatch(part))
    reason = first["msg"].removeprefix("Value error, ")
    where = f"{field}: " if field else ""
    if first["type"] == "missing":
        return f"{where}field is missing"
    if first["type"] == "extra_forbidden":
        return f"{where}no such field"
    return one_line(f"{where}{reason}, got {shorten(first['input'])}")


def first_problem(error: ValidationError) -> ErrorDetails:
    """The problem to tell of: where a field has several forms, that of the form which fits best, failing deepest and in fewest places."""
    problems = error.errors(include_url=False, include_context=False)
    same_field = [problem for problem in problems if problem["loc"][:1] == problems[0]["loc"][:1]]
    places = Counter(problem["loc"][:-1] for problem in same_field)
    return max(same_field, key=lambda problem: (len(problem["loc"]), -places[problem["loc"][:-1]]))


def shorten(value: object) -> str:
    """`repr(value)`, cut to MAX_VALUE_CHARS."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def one_line(text: str) -> str:
    """`text` with every run of white space made one space."""
    return " ".join(text.split())
