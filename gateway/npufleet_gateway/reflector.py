"""Keeps a store equal to the API server: list, watch, and again. The store serves on whatever happens here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from npufleet_gateway.errors import WatchError, WatchExpiredError
from npufleet_gateway.kube import KubeClient, Resource

logger = logging.getLogger(__name__)


class Store(Protocol):
    """What a reflector fills."""

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Take the result of a list."""

    def apply(self, event: str, raw: dict[str, Any]) -> None:
        """Take one watch event."""


@dataclass(frozen=True, slots=True)
class ReflectorSettings:
    """Times of a reflector.

    The server ends a watch after `server_seconds`; it sends bookmarks about every minute, so that `inactivity_seconds` without
    a byte means a dead connection.
    """

    server_seconds: int = 240
    inactivity_seconds: float = 90
    first_backoff_seconds: float = 0.2
    longest_backoff_seconds: float = 5


@dataclass(slots=True)
class ReflectorStats:
    """What a reflector counted, for metrics."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    expired: int = 0
    timeouts: int = 0
    errors: int = 0


class Reflector:
    """One kind's list-and-watch loop. `run` ends only by cancellation."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        store: Store,
        clock: Callable[[], float],
        settings: ReflectorSettings | None = None,
    ) -> None:
        self._client = client
        self.resource = resource
        self._store = store
        self._clock = clock
        self._settings = settings or ReflectorSettings()
        self._connected = False
        self._last_contact: float | None = None
        self._failures = 0
        self.stats = ReflectorStats()
        self.last_error = ""

    @property
    def age_seconds(self) -> float | None:
        """How old the store's content may be: 0 while a watch stands, None before the first list."""
        if self._last_contact is None:
            return None
        return 0.0 if self._connected else max(0.0, self._clock() - self._last_contact)

    async def run(self) -> None:
        """List and watch until cancelled."""
        resource_version: str | None = None
        while True:
            try:
                if resource_version is None:
                    resource_version = await self._list()
                resource_version = await self._watch(resource_version)
                continue
            except WatchExpiredError as error:
                resource_version = None
                self.stats.expired += 1
                self._note(error)
            except TimeoutError as error:
                self.stats.timeouts += 1
                self._note(error)
            except (WatchError, aiohttp.ClientError, OSError) as error:
                resource_version = None
                self.stats.errors += 1
                self._note(error)
            await asyncio.sleep(self._backoff_seconds())

    async def _list(self) -> str:
        result = await self._client.list(self.resource)
        self._store.replace(result.items)
        self.stats.lists += 1
        self._last_contact = self._clock()
        logger.info("listed %d of %s", len(result.items), self.resource.kind)
        return result.resource_version

    async def _watch(self, resource_version: str) -> str | None:
        settings = self._settings
        events = self._client.watch(
            self.resource, resource_version, server_seconds=settings.server_seconds, inactivity_seconds=settings.inactivity_seconds
        )
        self.stats.watches += 1
        current = resource_version
        opened = self._clock()
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    self._connected = True
                    self._last_contact = self._clock()
                    if event.type == "OPEN":
                        continue
                    self._failures = 0
                    current = event.resource_version or current
                    if event.type in ("ADDED", "MODIFIED", "DELETED"):
                        self.stats.events += 1
                        self._store.apply(event.type, event.object)
        except TimeoutError:
            if current != resource_version:
                return current
            raise
        finally:
            self._connected = False
        if self._clock() - opened < min(1.0, settings.server_seconds):
            raise WatchError("the server ended the watch at once")
        self._failures = 0
        self._last_contact = self._clock()
        return current

    def _note(self, error: Exception) -> None:
        self._failures += 1
        self.last_error = f"{type(error).__name__}: {error}"
        logger.warning("%s: %s (failure %d in a row)", self.resource.kind, self.last_error, self._failures)

    def _backoff_seconds(self) -> float:
        """Doubles up to the longest, with up to a half taken off at random, so that gateways do not return in step."""
        settings = self._settings
        doubled = settings.first_backoff_seconds * 2.0 ** min(self._failures - 1, 16)
        return min(settings.longest_backoff_seconds, doubled) * random.uniform(0.5, 1)  # noqa: S311  # spreads load, no secret
