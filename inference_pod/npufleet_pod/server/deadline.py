"""How long a client gives a request: the header x-npufleet-timeout-ms, counted from the request's arrival here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from npufleet_api.contract import TIMEOUT_HEADER
from npufleet_pod.errors import InvalidRequestError

MAX_MILLISECONDS = 24 * 3600 * 1000


def deadline_of(headers: Mapping[str, str]) -> float | None:
    """When the request's time is over, in the event loop's time; None: never. Raises InvalidRequestError."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    milliseconds = int(given) if given.isascii() and given.isdigit() and len(given) <= len(str(MAX_MILLISECONDS)) else 0
    if not 1 <= milliseconds <= MAX_MILLISECONDS:
        raise InvalidRequestError(f"{TIMEOUT_HEADER}: send whole milliseconds, 1 to {MAX_MILLISECONDS}", TIMEOUT_HEADER)
    return asyncio.get_running_loop().time() + milliseconds / 1000
