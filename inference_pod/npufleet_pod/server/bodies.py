"""Reads request bodies: bounded in bytes and time, parsed once."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from npufleet_pod.errors import BodyTooLargeError, InvalidRequestError, describe_validation_error, first_problem

BODY_TIMEOUT_SECONDS = 60
"""A client that sends its body more slowly is refused, so that it cannot hold a connection for ever."""

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], max_bytes: int) -> B:
    """Read and parse a JSON body. Raises BodyTooLargeError or InvalidRequestError."""
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > max_bytes:
                    raise BodyTooLargeError(f"the body is longer than {max_bytes} bytes: send less")
    except TimeoutError as error:
        raise InvalidRequestError(f"the body did not arrive within {BODY_TIMEOUT_SECONDS} s: send it again") from error
    except ClientDisconnect as error:
        raise InvalidRequestError("the client left while it sent the body") from error
    try:
        return kind.model_validate_json(bytes(raw))
    except ValidationError as error:
        location = first_problem(error)["loc"]
        param = str(location[0]) if location else None
        raise InvalidRequestError(describe_validation_error(error), param) from error
