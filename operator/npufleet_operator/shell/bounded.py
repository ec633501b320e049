"""Bodies of answers from pods: whole, but never more than what is agreed."""

from __future__ import annotations

import aiohttp


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, or its first `limit` + 1 bytes where it is longer: a parser that knows the limit then refuses it."""
    raw = bytearray()
    while len(raw) <= limit and (chunk := await response.content.read(limit + 1 - len(raw))):
        raw += chunk
    return bytes(raw)
