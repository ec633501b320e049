"""Lets requests through the doors of their models: waits, deadlines, bounds. The rules are in `door.py` and `entitlement.py`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass

from npufleet_gateway.door import Door, Ticket, TicketState
from npufleet_gateway.entitlement import ClassPolicy, guaranteed
from npufleet_gateway.errors import ApiError, Refusal, overloaded
from npufleet_gateway.routing import ModelKey
from npufleet_gateway.settings import GatewaySettings

REFRESH_SECONDS = 0.5
LONGEST_RETRY_AFTER_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """Who wants to come in. `wait_seconds` is the longest that it would wait."""

    model: ModelKey
    class_name: str
    flow: str = ""
    cost: float = 1.0
    wait_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """One class at one model's door, in requests; `guaranteed` and `borrowed` are shares of slots and need not be whole."""

    queued: int
    running: int
    guaranteed: float

    @property
    def borrowed(self) -> float:
        """What it holds beyond its guarantee: what idle classes, or nobody's share, lend it."""
        return max(0.0, self.running - self.guaranteed)


class Admission:
    """The doors of all models of a gateway. `slots` tells how many requests a model's replicas take from this gateway now."""

    def __init__(
        self,
        clock: Callable[[], float],
        settings: GatewaySettings,
        slots: Callable[[ModelKey], int],
        classes: Callable[[], Mapping[str, ClassPolicy]],
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._slots = slots
        self._classes = classes
        self._doors: dict[ModelKey, Door] = {}
        self._refreshed: dict[ModelKey, float] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def admit(self, entry: Entry) -> AsyncIterator[None]:
        """Hold a slot within the block. Raises ApiError (429) where the queue is full or the wait would be, or was, too long."""
        door = self._door(entry.model)
        now = self._clock()
        limit = self._settings.queue_seconds if entry.wait_seconds is None else min(entry.wait_seconds, self._settings.queue_seconds)
        queued = door.queued_of(entry.class_name)
        if door.queued or door.running >= door.slots:
            if queued >= self._settings.max_queued:
                raise self._overloaded(door, entry, Refusal.QUEUE_FULL, f"{queued} requests of its class wait already")
            if queued >= door.slots and (wait := door.wait_seconds(entry.class_name)) > limit:
                raise self._overloaded(door, entry, Refusal.WAIT_TOO_LONG, f"it would wait about {wait:.0f} seconds")
        ticket = door.arrive(entry.class_name, entry.flow, entry.cost, now)
        try:
            if ticket.state is TicketState.QUEUED:
                await self._wait(door, ticket, entry, limit)
            yield
        finally:
            self._wake(door.leave(ticket, self._clock()))

    def in_queue(self, key: ModelKey) -> dict[str, int]:
        """Requests of a model that wait, by class; the pool's classes all stand in it."""
        door = self._doors.get(key)
        return {name: door.queued_of(name) for name in self._classes()} if door is not None else {}

    def has_room(self, key: ModelKey) -> bool:
        """Whether the model has a free slot that nobody waits for."""
        door = self._doors.get(key)
        return door is not None and not door.queued and door.running < door.slots

    def slots_of(self, key: ModelKey) -> int | None:
        """Slots of a model as they were last set; None where no request has come for it."""
        door = self._doors.get(key)
        return None if door is None else door.slots

    def standing(self, key: ModelKey) -> dict[str, Standing]:
        """How a model's classes stand at its door; empty where no request has come for it."""
        door = self._doors.get(key)
        if door is None:
            return {}
        shares = guaranteed(door.slots, self._classes())
        return {name: Standing(door.queued_of(name), door.running_of(name), share) for name, share in shares.items()}

    async def run(self) -> None:
        """Follow replicas that come and go while requests wait. Runs until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            for key, door in list(self._doors.items()):
                if door.queued:
                    self._refresh(key, door)

    def retain(self, keys: Collection[ModelKey]) -> None:
        """Forget models that are gone and have nobody at their door."""
        for key in [key for key, door in self._doors.items() if key not in keys and not door.running and not door.queued]:
            del self._doors[key]
            del self._refreshed[key]

    def _door(self, key: ModelKey) -> Door:
        door = self._doors.get(key)
        if door is None:
            door = self._doors[key] = Door(self._slots(key), self._classes(), self._clock())
            self._refreshed[key] = self._clock()
        elif self._clock() - self._refreshed[key] >= REFRESH_SECONDS:
            self._refresh(key, door)
        return door

    def _refresh(self, key: ModelKey, door: Door) -> None:
        now = self._refreshed[key] = self._clock()
        self._wake(door.configure(self._slots(key), self._classes(), now))

    def _wake(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            future = self._waiting.pop(ticket, None)
            if future is not None and not future.done():
                future.set_result(None)

    async def _wait(self, door: Door, ticket: Ticket, entry: Entry, limit: float) -> None:
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit):
                await future
        except TimeoutError:
            if ticket.state is not TicketState.RUNNING:
                raise self._overloaded(door, entry, Refusal.DEADLINE_PASSED, f"no slot was free within {limit:g} seconds") from None
        finally:
            self._waiting.pop(ticket, None)

    def _overloaded(self, door: Door, entry: Entry, refusal: Refusal, reason: str) -> ApiError:
        wait = door.wait_seconds(entry.class_name)
        seconds = LONGEST_RETRY_AFTER_SECONDS if math.isinf(wait) else max(1, min(LONGEST_RETRY_AFTER_SECONDS, math.ceil(wait)))
        return overloaded("/".join(entry.model), entry.class_name, refusal, reason, seconds)
