"""Reads a page within bounds of time and size."""

from __future__ import annotations

import aiohttp

from npufleet_monitor.errors import ScrapeError

MAX_PAGE_BYTES = 8 * 1024 * 1024
TIMEOUT_SECONDS = 2.0


def open_session() -> aiohttp.ClientSession:
    """A session for local scrapes."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
    )


async def fetch(session: aiohttp.ClientSession, url: str, limit_bytes: int = MAX_PAGE_BYTES) -> bytes:
    """The body of a 200 answer. Raises ScrapeError, which names the address and what happened."""
    try:
        async with session.get(url, allow_redirects=False, headers={"accept-encoding": "identity"}) as response:
            if response.status != 200:
                raise ScrapeError(f"{url}: status {response.status}")
            parts: list[bytes] = []
            size = 0
            async for part in response.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > limit_bytes:
                    raise ScrapeError(f"{url}: more than {limit_bytes} bytes")
            return b"".join(parts)
    except TimeoutError as error:
        raise ScrapeError(f"{url}: no answer within {TIMEOUT_SECONDS:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ScrapeError(f"{url}: {type(error).__name__} {error}"[:300]) from error
