"""API keys: who is asking, what they may ask for, and how often.

The keys' Secret is mounted as a folder with a file for each key: its name is the key's name in logs and metrics, its content YAML:

    key: sk-…                     # or sha256: the key's digest in hexadecimal, so that the Secret does not hold the key
    class: chat                   # optional: the class of its requests
    classes: [document]           # optional: classes that its requests may claim by header besides
    models: [qwen72b, team-a/*]   # optional: served names or namespace/name, with * and ?; without it every model
    requestsPerMinute: 600        # optional
    tokensPerMinute: 200000       # optional: of prompts and answers together

Keys are kept and compared as digests, in constant time, and never logged. A file that cannot be read is told by its name and field; its key
is refused. The folder is looked at every two seconds, so that a changed Secret needs no restart.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import hmac
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from npufleet_gateway.errors import ApiError, invalid_key, missing_key, rate_limited
from npufleet_gateway.routing import ModelRoute

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
MAX_FILE_BYTES = 64 * 1024
MAX_KEYS = 10_000
MAX_KEY_LENGTH = 1024

Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
Rate = Annotated[int, Field(ge=1, le=10**12)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its name; the key itself is not in it."""

    name: str
    class_name: str | None = None
    claims: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def allows(self, route: ModelRoute) -> bool:
        """Whether the key may ask for the model."""
        names = (route.public_name, route.model.qualified_name)
        return not self.models or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.models)


class _KeyFile(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", hide_input_in_errors=True)

    key: Annotated[str, StringConstraints(min_length=8, max_length=MAX_KEY_LENGTH, pattern=r"^[\x21-\x7e]+$")] | None = None
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    class_: Annotated[Name | None, Field(alias="class")] = None
    classes: list[Name] = Field(default=[], max_length=16)
    models: list[Name] = Field(default=[], max_length=1024)
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None

    @model_validator(mode="after")
    def _one_secret(self) -> _KeyFile:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self


def parse_key(name: str, text: bytes) -> tuple[bytes, ApiKey]:
    """A key's digest and what it may do. Raises ValueError, which names the field and never the value."""
    try:
        raw: Any = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ValueError("not YAML") from None
    try:
        found = _KeyFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'key'}: {first['msg']}") from None
    digest = bytes.fromhex(found.sha256) if found.sha256 is not None else hashlib.sha256((found.key or "").encode()).digest()
    return digest, ApiKey(
        name,
        found.class_,
        frozenset(found.classes),
        tuple(found.models),
        found.requests_per_minute,
        found.tokens_per_minute,
    )


class KeyRing:
    """The keys that are valid now. Without a folder the door is open, and nobody is asked."""

    def __init__(self, folder: Path | None, classes: Callable[[], Collection[str]] = tuple) -> None:
        """classes: those of the pool; empty while they are not known."""
        self._folder = folder
        self._classes = classes
        self._told: tuple[object, frozenset[str]] | None = None
        self.unknown_classes: frozenset[tuple[str, str]] = frozenset()
        """Keys that name classes which the pool does not have, and those classes."""
        self._keys: dict[bytes, tuple[bytes, ApiKey]] = {}
        self._seen: object = None
        self.refused: tuple[str, ...] = ()
        """Files that hold no usable key."""

    @property
    def valid(self) -> int:
        """Keys that open the door."""
        return len(self._keys)

    @property
    def required(self) -> bool:
        """Whether requests must bring a key."""
        return self._folder is not None

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
        """Who asks, by `Authorization: Bearer` or `api-key`; None where no key is asked for. Raises ApiError (401)."""
        if self._folder is None:
            return None
        presented = _presented(headers)
        if presented is None:
            raise missing_key()
        digest = hashlib.sha256(presented).digest()
        found = self._keys.get(digest[:8])
        # The table is by a part of the digest, which tells nothing of a key; what decides is compared in constant time.
        if found is None or not hmac.compare_digest(found[0], digest):
            raise invalid_key()
        return found[1]

    def load(self) -> None:
        """Read the folder where it has changed. A folder that is not there, or cannot be read, holds no key: the door is closed."""
        if self._folder is None:
            return
        seen = _fingerprint(self._folder)
        if seen == self._seen:
            return
        keys: dict[bytes, tuple[bytes, ApiKey]] = {}
        refused: list[str] = []
        for path in _files(self._folder)[:MAX_KEYS]:
            try:
                with path.open("rb") as file:
                    text = file.read(MAX_FILE_BYTES + 1)
                if len(text) > MAX_FILE_BYTES:
                    raise ValueError(f"more than {MAX_FILE_BYTES} bytes")  # told like any other fault of the file
                digest, key = parse_key(path.name, text)
                if digest[:8] in keys:
                    raise ValueError(f"key: the same as that of {keys[digest[:8]][1].name}; each entry needs a key of its own")
            except (OSError, ValueError) as error:
                reason = type(error).__name__ if isinstance(error, OSError) else str(error)
                logger.error("API key %s is refused: %s", path.name, reason)  # the reason is all there is
                refused.append(path.name)
                continue
            keys[digest[:8]] = (digest, key)
        self._keys, self._seen, self.refused = keys, seen, tuple(refused)
        logger.info("%d API keys, %d refused", len(keys), len(refused))

    async def run(self) -> None:
        """Follow the folder until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.load)
            self.tell_unknown_classes()

    def tell_unknown_classes(self) -> None:
        """Log once each class that a key names and the pool does not have. Keys may be many: they are walked where something changed."""
        classes = frozenset(self._classes())
        if self._told is not None and self._told[0] is self._keys and self._told[1] == classes:
            return
        self._told = (self._keys, classes)
        named = (
            (key.name, name) for _, key in self._keys.values() for name in {*key.claims, *((key.class_name,) if key.class_name else ())}
        )
        found = frozenset(pair for pair in named if classes and pair[1] not in classes)
        for key, name in sorted(found - self.unknown_classes):
            logger.error(
                "API key %s names the class %r, which the pool does not have (%s): its requests have no guarantee and the lowest priority",
                key,
                name[:64],
                ", ".join(sorted(classes)),
            )
        self.unknown_classes = found


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()[:MAX_KEY_LENGTH]
        if name in (b"api-key", b"x-api-key"):
            return value.strip()[:MAX_KEY_LENGTH]
    return None


def _files(folder: Path) -> list[Path]:
    """Entries of a mounted Secret; the kubelet's own links begin with two dots."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _fingerprint(folder: Path) -> object:
    found = []
    for path in _files(folder):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return found


class _Bucket:
    """A token bucket of a minute's worth; it may go into debt, since what an answer costs is known at its end."""

    __slots__ = ("_full", "_left", "_per_second", "_time")

    def __init__(self, per_minute: float, now: float) -> None:
        self._full = self._left = per_minute
        self._per_second = per_minute / 60
        self._time = now

    def wait_seconds(self, now: float) -> float:
        """Seconds until one more may be taken; 0 if it may now."""
        self._left = min(self._full, self._left + (now - self._time) * self._per_second)
        self._time = now
        return 0.0 if self._left >= min(1.0, self._full) else (min(1.0, self._full) - self._left) / self._per_second

    def take(self, amount: float) -> None:
        """Take, into debt if need be."""
        self._left -= amount


class RateLimits:
    """The limits of all keys at this gateway, which has its share of each: `gateways` is how many there are."""

    def __init__(self, clock: Callable[[], float], gateways: Callable[[], int]) -> None:
        self._clock = clock
        self._gateways = gateways
        self._buckets: dict[tuple[str, str], tuple[float, _Bucket]] = {}

    def take(self, key: ApiKey | None) -> None:
        """Count a request. Raises ApiError (429) where the key has used up its requests or tokens: that is the client's own limit."""
        if key is None:
            return
        buckets = [
            (what, per_minute, bucket)
            for what, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute))
            if per_minute is not None and (bucket := self._bucket(key.name, what, per_minute)) is not None
        ]
        for what, per_minute, bucket in buckets:
            wait = bucket.wait_seconds(self._clock())
            if wait > 0:
                raise rate_limited(what, per_minute, wait)
        for what, _, bucket in buckets:
            if what == "requests":
                bucket.take(1)

    def spend(self, key: ApiKey | None, tokens: int) -> None:
        """Count the tokens of an answered request."""
        if key is not None and key.tokens_per_minute is not None:
            self._bucket(key.name, "tokens", key.tokens_per_minute).take(tokens)

    def _bucket(self, name: str, what: str, per_minute: int) -> _Bucket:
        share = per_minute / self._gateways()
        held = self._buckets.get((name, what))
        if held is None or held[0] != share:
            if len(self._buckets) > 4 * MAX_KEYS:
                self._buckets.clear()
            held = self._buckets[(name, what)] = (share, _Bucket(share, self._clock()))
        return held[1]


def require_model(key: ApiKey | None, route: ModelRoute) -> None:
    """Raise ApiError (403) unless the key may ask for the model."""
    if key is not None and not key.allows(route):
        raise ApiError(
            403,
            "permission_error",
            "model_not_allowed",
            f"This API key may not use the model {route.public_name!r}: GET /v1/models lists those that it may use.",
            param="model",
        )
