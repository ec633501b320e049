"""The door to a model's replicas: who of those who wait gets the next free slot. No I/O; the caller gives the time.

Between classes the slot goes to the one that is furthest below its entitlement (`entitlement.py`). What rounding to whole slots owes a
class is carried over, up to CARRIED_SLOTS times a usual request, so that shares hold over time and a class whose entitlement is less than
a slot gets its turn; no class can claim the past beyond that.

Within a class it is start-time fair queueing (Goyal, Vin and Cheng, 1996) over flows (a client's key), by the cost of their requests.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from enum import Enum, auto

from npufleet_gateway.entitlement import ClassPolicy, entitled

CARRIED_SLOTS = 2.0
FIRST_SERVICE_SECONDS = 1.0
SERVICE_WEIGHT = 0.05
"""Weight of the latest request in the mean time that a slot is held."""
MAX_FLOWS = 4096


class TicketState(Enum):
    """Where a request stands."""

    QUEUED = auto()
    RUNNING = auto()
    GONE = auto()


class Ticket:
    """One request at the door."""

    __slots__ = ("class_name", "cost", "flow", "since", "start", "state")

    def __init__(self, class_name: str, flow: str, cost: float, now: float) -> None:
        self.class_name = class_name
        self.flow = flow
        self.cost = cost
        self.since = now
        """Since when it waits, or holds its slot."""
        self.start = 0.0
        self.state = TicketState.QUEUED


class _Queue:
    """Those of one class."""

    __slots__ = ("_finish", "_heap", "_number", "_virtual", "carried", "queued", "running")

    def __init__(self) -> None:
        self.queued = 0
        self.running = 0
        self.carried = 0.0
        """Slot-seconds that the class got too few (or, negative, too many) by rounding."""
        self._heap: list[tuple[float, int, Ticket]] = []
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._number = 0

    def push(self, ticket: Ticket) -> None:
        ticket.start = max(self._virtual, self._finish.get(ticket.flow, 0.0))
        self._finish[ticket.flow] = ticket.start + ticket.cost
        self._number += 1
        heapq.heappush(self._heap, (ticket.start, self._number, ticket))
        self.queued += 1
        if len(self._finish) > MAX_FLOWS:
            self._finish = {flow: finish for flow, finish in self._finish.items() if finish > self._virtual}

    def pop(self) -> Ticket:
        while True:
            start, _, ticket = heapq.heappop(self._heap)
            if ticket.state is TicketState.QUEUED:
                self._virtual = start
                self.queued -= 1
                return ticket

    def forget(self) -> None:
        """One of the queued has gone; its entry is passed over when it comes up."""
        self.queued -= 1
        if not self.queued:
            self._heap.clear()
            self._finish.clear()
        elif len(self._heap) > 2 * self.queued + 64:
            self._heap = [entry for entry in self._heap if entry[2].state is TicketState.QUEUED]
            heapq.heapify(self._heap)


class Door:
    """Slots of one model and the queues before them."""

    def __init__(self, slots: int, classes: Mapping[str, ClassPolicy], now: float) -> None:
        self.slots = slots
        self.running = 0
        self.queued = 0
        self.service_seconds = FIRST_SERVICE_SECONDS
        """Mean time that a slot is held."""
        self._classes = classes
        self._queues: dict[str, _Queue] = {}
        self._last = now

    def configure(self, slots: int, classes: Mapping[str, ClassPolicy], now: float) -> list[Ticket]:
        """Change slots and classes. Those who get a slot by it are returned; a slot in use is never taken."""
        self._advance(now)
        self.slots, self._classes = slots, classes
        return self._fill(now)

    def arrive(self, class_name: str, flow: str, cost: float, now: float) -> Ticket:
        """A request comes; it has its slot already if its state is RUNNING."""
        ticket = Ticket(class_name, flow, cost, now)
        queue = self._queues.get(class_name)
        if queue is None:
            queue = self._queues[class_name] = _Queue()
        if self.queued == 0 and self.running < self.slots:
            self._last = now
            self._admit(queue, ticket, now)
            return ticket
        self._advance(now)
        queue.push(ticket)
        self.queued += 1
        self._fill(now)
        return ticket

    def leave(self, ticket: Ticket, now: float) -> list[Ticket]:
        """A request has ended, or gave up waiting. Those who get a slot by it are returned. Harmless when repeated."""
        if ticket.state is TicketState.GONE:
            return []
        self._advance(now)
        queue = self._queues[ticket.class_name]
        was, ticket.state = ticket.state, TicketState.GONE
        if was is TicketState.QUEUED:
            queue.forget()
            self.queued -= 1
        else:
            queue.running -= 1
            self.running -= 1
            self.service_seconds += SERVICE_WEIGHT * (max(0.0, now - ticket.since) - self.service_seconds)
        if not queue.queued and not queue.running:
            del self._queues[ticket.class_name]
        return self._fill(now)

    def queued_of(self, class_name: str) -> int:
        """Requests of a class that wait."""
        queue = self._queues.get(class_name)
        return queue.queued if queue else 0

    def running_of(self, class_name: str) -> int:
        """Requests of a class that hold a slot."""
        queue = self._queues.get(class_name)
        return queue.running if queue else 0

    def wait_seconds(self, class_name: str) -> float:
        """How long one more request of the class would wait, as things stand."""
        demand = {name: float(queue.queued + queue.running) for name, queue in self._queues.items()}
        demand[class_name] = demand.get(class_name, 0.0) + 1
        share = entitled(self.slots, demand, self._classes)[class_name]
        return (self.queued_of(class_name) + 1) * self.service_seconds / share if share > 0 else math.inf

    def _entitled(self) -> dict[str, float]:
        demand = {name: float(queue.queued + queue.running) for name, queue in self._queues.items()}
        return entitled(self.slots, demand, self._classes)

    def _advance(self, now: float) -> None:
        """Carry over what the time since the last change owed each class. Without a queue nobody is owed anything."""
        seconds, self._last = max(0.0, now - self._last), now
        if not self.queued:
            for queue in self._queues.values():
                queue.carried = 0.0
            return
        if seconds == 0.0:
            return
        limit = CARRIED_SLOTS * self.service_seconds
        shares = self._entitled()
        for name, queue in self._queues.items():
            owed = queue.carried + (shares.get(name, 0.0) - queue.running) * seconds
            queue.carried = max(-limit, min(limit, owed)) if queue.queued else min(0.0, max(-limit, owed))

    def _fill(self, now: float) -> list[Ticket]:
        admitted: list[Ticket] = []
        if not self.queued or self.running >= self.slots:
            return admitted
        shares = self._entitled()
        while self.queued and self.running < self.slots:
            queue = max(
                (queue for queue in self._queues.items() if queue[1].queued),
                key=lambda item: (self._owed(item[1], shares.get(item[0], 0.0)), self._priority(item[0]), item[0]),
            )[1]
            ticket = queue.pop()
            self.queued -= 1
            self._admit(queue, ticket, now)
            admitted.append(ticket)
        return admitted

    def _owed(self, queue: _Queue, share: float) -> float:
        return share - queue.running + queue.carried / max(self.service_seconds, 1e-9)

    def _priority(self, name: str) -> int:
        policy = self._classes.get(name)
        return policy.priority if policy else -1

    def _admit(self, queue: _Queue, ticket: Ticket, now: float) -> None:
        ticket.state = TicketState.RUNNING
        ticket.since = now
        queue.running += 1
        self.running += 1
