"""Ranges of files over HTTP, with what each status means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from time import time

import aiohttp

from npufleet_fetch.errors import FetchError, NoRangesError, SourceNotFoundError, SourceUnauthorizedError, TransientError
from npufleet_fetch.files import RemoteFile

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
CHUNK_BYTES = 1 << 20
MAX_RETRY_AFTER_SECONDS = 120.0
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A session that obeys the proxies of the environment. Authorization is not sent on to other hosts by a redirect."""
    return aiohttp.ClientSession(headers=headers, timeout=TIMEOUT, trust_env=True, read_bufsize=CHUNK_BYTES)


def refusal(status: int, what: str, *, credentials: bool, retry_after: str | None = None) -> Exception:
    """What an answer with an error's status means for `what`."""
    if status == 401 or status == 403:
        remedy = (
            "the credentials in model.secretRef are not accepted: renew them, and accept the model's terms with their account"
            if credentials
            else "it asks for credentials: name a Secret that holds them in model.secretRef"
        )
        return SourceUnauthorizedError(f"{what}: status {status}: {remedy}")
    if status in (404, 410):
        return SourceNotFoundError(f"{what}: status {status}: correct model.uri or model.revision")
    if status in RETRIED or status >= 500:
        return TransientError(f"{what}: status {status}", _seconds(retry_after))
    return FetchError(f"{what}: status {status}: this is not an answer of such a source: check model.endpoint")


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time()
        except ValueError:
            return None
    return min(MAX_RETRY_AFTER_SECONDS, max(0.0, seconds))


async def read_range(
    session: aiohttp.ClientSession, url: str, file: RemoteFile, start: int, end: int, *, credentials: bool
) -> AsyncIterator[bytes]:
    """Bytes of one range. Raises FetchError, TransientError or NoRangesError."""
    headers = {"Accept-Encoding": "identity"}
    if (start, end) != (0, file.size):
        headers["Range"] = f"bytes={start}-{end - 1}"
    try:
        async with session.get(url, headers=headers) as answer:
            if answer.status not in (200, 206):
                raise refusal(answer.status, file.path, credentials=credentials, retry_after=answer.headers.get("Retry-After"))
            if answer.status == 200 and "Range" in headers:
                raise NoRangesError(file.path)
            async for piece in answer.content.iter_chunked(CHUNK_BYTES):
                yield piece
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TransientError(f"{file.path}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An error of a connection without its URL, which may be signed."""
    reason = getattr(error, "strerror", None)
    return f"{type(error).__name__}{f': {reason}' if reason else ''}"
