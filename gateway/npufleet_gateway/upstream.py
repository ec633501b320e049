"""Connections to the replicas: one pooled client session, and what of the headers goes through."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterable

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from npufleet_api.contract import DRAINING_HEADER, REPLICA_HEADER, REQUEST_ID_HEADER

RawHeaders = Iterable[tuple[bytes, bytes]]

KEEPALIVE_SECONDS = 3.0
"""Idle connections are closed before the replica's server closes them (uvicorn: after 5 s), so that no request meets a closing one."""

LARGE_BODY_BYTES = 1024 * 1024
"""Above this aiohttp wants a file-like body, which it writes in pieces, so that one write does not hold the loop."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, section 7.6.1; a Connection header may name more."""
NOT_TO_REPLICAS = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect", "authorization", "api-key", "x-api-key", "cookie"}
"""Credentials end at the gateway, and bodies are not compressed between the two."""
NOT_TO_CLIENTS = HOP_BY_HOP | {"content-length", "date", "server", "set-cookie", DRAINING_HEADER, REQUEST_ID_HEADER, REPLICA_HEADER}
MAX_REQUEST_ID_LENGTH = 128


def open_session(connect_timeout_seconds: float, idle_seconds: float) -> aiohttp.ClientSession:
    """The session that all requests to replicas share. Redirects, cookies, proxies and decompression are off."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, use_dns_cache=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds, sock_read=idle_seconds),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        read_bufsize=64 * 1024,
        trust_env=False,
    )


def replica_url(host: str, port: int, path: str) -> URL:
    """Address of `path` at a replica. A client's query stays at the gateway: no proxied route takes one."""
    return URL(f"http://{host}:{port}{path}", encoded=True)


def request_headers(raw: RawHeaders, request_id: str) -> CIMultiDict[str]:
    """What a replica gets of a client's headers. Values outside ASCII, which HTTP leaves undefined, do not go through."""
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw if value.isascii()]
    named = {token.strip().lower() for name, value in pairs if name == "connection" for token in value.split(",")}
    headers = CIMultiDict(
        (name, value) for name, value in pairs if name not in NOT_TO_REPLICAS and name not in named and name != REQUEST_ID_HEADER
    )
    headers[REQUEST_ID_HEADER] = request_id
    return headers


def response_headers(response: aiohttp.ClientResponse, request_id: str, replica: str) -> list[tuple[bytes, bytes]]:
    """What a client gets of a replica's headers."""
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.decode("latin-1").split(",")}
    kept = [(n, v) for n, v in headers if (text := n.decode("latin-1")) not in NOT_TO_CLIENTS and text not in named]
    kept.append((REQUEST_ID_HEADER.encode(), request_id.encode()))
    kept.append((REPLICA_HEADER.encode(), replica.encode()))
    return kept


def request_id_of(raw: RawHeaders) -> str:
    """The client's own request id where it is printable and short, else a new one."""
    for name, value in raw:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID_LENGTH and all(33 <= byte <= 126 for byte in value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def request_body(body: bytes) -> bytes | io.BytesIO:
    """The body as aiohttp wants it; a new one for each attempt."""
    return io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body
