"""Holds requests for a model without a ready replica until one is: scale from zero, as its clients see it.

How many are held is demand, and stands in the report. A stream that is held hears from the gateway: after HEARTBEAT_SECONDS its answer
begins, and a comment follows in each such interval, so that nothing on the way takes the connection for dead.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from npufleet_gateway.errors import Refusal, held_too_long, no_ready_replica, too_many_held
from npufleet_gateway.routing import ModelKey, ModelRoute
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.view import ClusterView

HEARTBEAT = b": waiting for a replica\n\n"


class Holder:
    """Requests that wait for a first replica."""

    def __init__(self, view: ClusterView, settings: GatewaySettings) -> None:
        self._view = view
        self._settings = settings
        self._held: Counter[ModelKey] = Counter()
        self._changed: set[asyncio.Event] = set()
        view.on_change(self._wake)

    def held(self, key: ModelKey) -> int:
        """Requests of a model that are held."""
        return self._held[key]

    async def wait(self, route: ModelRoute, beat: Callable[[], Awaitable[None]] | None) -> None:
        """Until the model has a ready replica, or is gone (the caller then finds no replica). `beat` is called while it takes long.

        Raises ApiError: 429 where too many are held already, 503 after `hold_seconds`, at once where that is 0.
        """
        if route.ready:
            return
        if not self._settings.hold_seconds:
            raise no_ready_replica(route.public_name, route.states(), self._settings.retry_after_seconds, Refusal.NO_REPLICA)
        key = route.model.key
        if self._held[key] >= self._settings.max_held:
            raise too_many_held(route.public_name, self._held[key], self._settings.retry_after_seconds)
        self._held[key] += 1
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            async with asyncio.timeout(self._settings.hold_seconds) as deadline:
                while self._waits(route):
                    try:
                        async with asyncio.timeout(self._settings.heartbeat_seconds):
                            await changed.wait()
                        changed.clear()
                    except TimeoutError:
                        if deadline.expired():
                            raise
                        if beat is not None:
                            await beat()
        except TimeoutError:
            now = self._view.table.find(route.model.qualified_name)
            states = now.states() if now is not None else "it was deleted"
            raise held_too_long(route.public_name, self._settings.hold_seconds, states, self._settings.retry_after_seconds) from None
        finally:
            self._changed.discard(changed)
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def _waits(self, route: ModelRoute) -> bool:
        now = self._view.table.find(route.model.qualified_name)
        return now is not None and now.model.uid == route.model.uid and not now.ready

    def _wake(self) -> None:
        for event in self._changed:
            event.set()
