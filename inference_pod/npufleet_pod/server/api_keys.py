"""API keys of an engine that clients reach without a gateway: a folder with a file for each key, as a mounted Secret is.

A file's name is the key's name in logs, its content the key, or `sha256:` and the key's digest in hexadecimal. Keys are kept and compared
as digests, in constant time, and never logged. The folder is looked at every two seconds, so that a changed Secret needs no restart. While
it holds no key every request is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, READY_PATH
from npufleet_pod.server.errors import ErrorAnswer

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
MAX_FILE_BYTES = 64 * 1024
MAX_KEYS = 10_000
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
KEY = re.compile(r"[\x21-\x7e]{8,1024}")
OPEN_PATHS = frozenset({HEALTH_PATH, READY_PATH, METRICS_PATH})
"""What probes and scrapes ask for."""


class ApiKeys:
    """The keys that are valid now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[str, bytes] = {}
        self._refused: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of the keys in use."""
        return frozenset(self._digests)

    def read(self) -> None:
        """Take what the folder holds now; what is no key is told once, by its file's name only. Blocks on the file system."""
        found: dict[str, bytes] = {}
        refused = set()
        try:
            # The kubelet's own links and folders begin with two dots.
            paths = sorted(path for path in self._folder.iterdir() if not path.name.startswith("."))[:MAX_KEYS]
        except OSError:
            paths = []
        for path in paths:
            digest = _digest(path)
            if digest is None:
                refused.add(path.name)
            else:
                found[path.name] = digest
        if found != self._digests:
            logger.info("api keys changed", extra={"count": len(found)})
        for name in sorted(refused - self._refused):
            logger.warning(
                "not an API key: write 8 to 1024 printable characters without spaces, or sha256: and a digest", extra={"file": name}
            )
        self._digests, self._refused = found, frozenset(refused)

    async def follow(self) -> None:
        """Read the folder again and again until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.read)

    def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Name of the key in `Authorization: Bearer`, `api-key` or `x-api-key`; None: there is none, or not a valid one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else headers.get("api-key") or headers.get("x-api-key") or ""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        match = None
        for name, own in self._digests.items():
            if hmac.compare_digest(own, digest):
                match = name
        return match


def _digest(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    if text.startswith("sha256:"):
        match = DIGEST.fullmatch(text)
        return None if match is None else bytes.fromhex(match[1])
    return hashlib.sha256(text.encode()).digest() if KEY.fullmatch(text) else None


class ApiKeyMiddleware:
    """Refuses requests without a valid key, before anything of their body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is open, or comes with a key, whose name is noted for the log."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        name = self._keys.name_of(Headers(scope=scope))
        if name is None:
            await UNAUTHORISED.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = name
        await self._app(scope, receive, send)


UNAUTHORISED = ErrorAnswer(
    401,
    "no valid API key: send one as Authorization: Bearer",
    "authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
