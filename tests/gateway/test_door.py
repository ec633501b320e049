"""Who gets the next slot: entitlements as a table, and the door by properties over simulated traffic."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_gateway.door import Door, Ticket, TicketState
from npufleet_gateway.entitlement import MIN_SHARE, ClassPolicy, entitled

CHAT = ClassPolicy("chat", 3, 0.2, 0.5)
DOCUMENT = ClassPolicy("document", 2, 0.3, 0.6)
CODE = ClassPolicy("code", 1, 0.1, 0.4)
POOL = {policy.name: policy for policy in (CHAT, DOCUMENT, CODE)}
MUCH = 10_000


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        ({"chat": MUCH, "document": MUCH, "code": MUCH}, {"chat": 50, "document": 40, "code": 10}),
        ({"chat": MUCH, "code": MUCH}, {"chat": 60, "code": 40}),
        ({"code": MUCH}, {"code": 100}),
        ({"chat": 10, "document": MUCH, "code": MUCH}, {"chat": 10, "document": 60, "code": 30}),
        ({"chat": 10, "document": 5, "code": 3}, {"chat": 10, "document": 5, "code": 3}),
        ({"chat": MUCH, "other": MUCH}, {"chat": 50, "other": 50}),
        ({"chat": 0, "code": 1}, {"code": 1}),
        ({}, {}),
    ],
)
def test_guarantees_come_first_and_the_rest_is_lent_by_priority(demand: dict[str, float], expected: dict[str, float]) -> None:
    assert entitled(100, demand, POOL) == pytest.approx(expected)


def test_equal_priorities_share_evenly_what_is_lent() -> None:
    classes = {name: ClassPolicy(name, 1, 0.1) for name in ("a", "b")}
    assert entitled(100, {"a": MUCH, "b": MUCH}, classes) == pytest.approx({"a": 50, "b": 50})


POLICIES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 100)),
    min_size=1,
)


def policies(drawn: dict[str, tuple[int, int, int]]) -> dict[str, ClassPolicy]:
    """Classes as a pool could have them: guarantees that add up to 100 percent at most."""
    scale = max(1.0, sum(share for _, share, _ in drawn.values()) / 100)
    return {
        name: ClassPolicy(name, priority, share / 100 / scale, max(share, ceiling) / 100)
        for name, (priority, share, ceiling) in drawn.items()
    }


@given(POLICIES, st.floats(0.5, 500), st.dictionaries(st.sampled_from(["a", "b", "c", "d", "unknown"]), st.integers(0, 300)))
def test_entitlements_use_every_slot_and_keep_every_guarantee(
    drawn: dict[str, tuple[int, int, int]], slots: float, demand: dict[str, int]
) -> None:
    classes = policies(drawn)
    found = entitled(slots, demand, classes)
    assert sum(found.values()) == pytest.approx(min(slots, sum(demand.values())))
    scale = 1 + MIN_SHARE * len(demand)
    for name, wanted in demand.items():
        policy = classes.get(name) or ClassPolicy(name)
        assert found.get(name, 0.0) <= wanted + 1e-6
        assert found.get(name, 0.0) >= min(wanted, slots * policy.guarantee / scale) - 1e-6


@dataclass
class Simulation:
    """Closed loops of clients on a clock of its own: each asks again as soon as it was answered."""

    slots: int
    classes: dict[str, ClassPolicy]
    service: dict[str, float]
    seed: int = 0
    now: float = 0.0
    served: dict[str, float] = field(default_factory=dict)
    """Slot-seconds by class."""
    admitted: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)  # noqa: S311  # a simulation
        self.door = Door(self.slots, self.classes, self.now)
        self.numbers = itertools.count()
        self.ends: list[tuple[float, int, Ticket]] = []
        self.wanted: dict[str, int] = {}

    def want(self, name: str, clients: int) -> None:
        """From now on so many clients of the class keep asking."""
        before = self.wanted.get(name, 0)
        self.wanted[name] = clients
        for _ in range(clients - before):
            self._ask(name)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.ends and self.ends[0][0] <= until:
            at, _, ticket = heapq.heappop(self.ends)
            self.now = at
            self._start(self.door.leave(ticket, at))
            if self.door.running_of(ticket.class_name) + self.door.queued_of(ticket.class_name) < self.wanted[ticket.class_name]:
                self._ask(ticket.class_name)
            assert self.door.running == self.slots or self.door.queued == 0, "a slot is free while somebody waits"
        self.now = until

    def _ask(self, name: str) -> None:
        ticket = self.door.arrive(name, "key", 1.0, self.now)
        if ticket.state is TicketState.RUNNING:
            self._start([ticket])

    def _start(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            length = self.service[ticket.class_name] * self.random.uniform(0.5, 1.5)
            name = ticket.class_name
            self.served[name] = self.served.get(name, 0.0) + length
            self.admitted.setdefault(name, []).append(self.now)
            heapq.heappush(self.ends, (self.now + length, next(self.numbers), ticket))


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([3, 8, 20]),
    st.fixed_dictionaries({name: st.floats(0.5, 2.0) for name in POOL}),
    st.integers(0, 1000),
)
def test_under_saturation_every_class_gets_its_entitlement(slots: int, service: dict[str, float], seed: int) -> None:
    simulation = Simulation(slots, POOL, service, seed)
    for name in POOL:
        simulation.want(name, 3 * slots)
    simulation.run(20)
    simulation.served.clear()
    simulation.run(40 * 60 / slots)
    total = sum(simulation.served.values())
    for name, share in entitled(1.0, dict.fromkeys(POOL, float(MUCH)), POOL).items():
        assert simulation.served[name] / total == pytest.approx(share, abs=0.05)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 5]), POLICIES, st.integers(0, 1000))
def test_no_class_starves_however_few_the_slots_are(slots: int, drawn: dict[str, tuple[int, int, int]], seed: int) -> None:
    classes = policies(drawn)
    simulation = Simulation(slots, classes, dict.fromkeys(classes, 1.0), seed)
    for name in classes:
        simulation.want(name, 4 * slots)
    simulation.run(600)
    for name in classes:
        times = simulation.admitted[name]
        share = entitled(float(slots), dict.fromkeys(classes, float(MUCH)), classes)[name]
        assert max(b - a for a, b in itertools.pairwise([0.0, *times, simulation.now])) <= 10 + 6 / share


def test_an_idle_share_is_lent_within_a_second_and_given_back_at_once() -> None:
    simulation = Simulation(20, POOL, dict.fromkeys(POOL, 0.2))
    simulation.want("code", 100)
    simulation.run(1)
    assert simulation.door.running_of("code") == 20
    simulation.want("chat", 12)
    simulation.run(0.4)
    assert simulation.door.running_of("chat") >= 10
    simulation.want("chat", 0)
    simulation.run(1)
    assert simulation.door.running_of("code") == 20


def test_who_had_nothing_for_long_cannot_claim_more_than_its_share_afterwards() -> None:
    simulation = Simulation(10, POOL, {"chat": 0.1, "document": 100.0, "code": 0.1})
    simulation.want("document", 10)
    simulation.run(1)
    simulation.want("code", 50)
    simulation.run(60)
    assert simulation.admitted.get("code") is None
    simulation.want("document", 0)
    simulation.want("chat", 50)
    simulation.run(150)
    simulation.served.clear()
    simulation.run(20)
    total = sum(simulation.served.values())
    assert simulation.served["chat"] / total == pytest.approx(0.6, abs=0.05)


@settings(max_examples=100)
@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["arrive", "leave", "configure"]), st.integers(0, 30)), max_size=120))
def test_no_slot_leaks_whatever_comes_and_goes(slots: int, steps: list[tuple[str, int]]) -> None:
    door = Door(slots, POOL, 0.0)
    tickets: list[Ticket] = []
    for now, (what, number) in enumerate(steps):
        if what == "arrive":
            tickets.append(door.arrive(["chat", "document", "code", "other"][number % 4], f"key-{number % 3}", 1.0, float(now)))
        elif what == "leave" and tickets:
            ticket = tickets[number % len(tickets)]
            for admitted in door.leave(ticket, float(now)):
                assert admitted.state is TicketState.RUNNING
            assert door.leave(ticket, float(now)) == []
        elif what == "configure":
            slots = number
            door.configure(slots, POOL, float(now))
        states = [ticket.state for ticket in tickets]
        assert door.running == states.count(TicketState.RUNNING)
        assert door.queued == states.count(TicketState.QUEUED)
        assert door.queued == 0 or door.running >= slots
    for ticket in tickets:
        door.leave(ticket, 1000.0)
    assert (door.running, door.queued) == (0, 0)


def test_flows_of_a_class_take_turns_by_cost() -> None:
    door = Door(1, POOL, 0.0)
    holder = door.arrive("chat", "first", 1.0, 0.0)
    tickets = [door.arrive("chat", "greedy", 1.0, 0.0) for _ in range(6)]
    tickets += [door.arrive("chat", "modest", 1.0, 0.0) for _ in range(2)] + [door.arrive("chat", "dear", 3.0, 0.0) for _ in range(2)]
    order: list[str] = []
    while door.queued:
        (holder,) = door.leave(holder, 0.0)
        order.append(holder.flow)
    assert order[:3] == ["greedy", "modest", "dear"]
    assert order.index("modest", 2) < 5
    assert order[:6].count("greedy") == 3
    assert order[-1] == "greedy"


def test_the_expected_wait_grows_with_the_queue_and_shrinks_with_the_share() -> None:
    door = Door(4, POOL, 0.0)
    for _ in range(8):
        door.arrive("chat", "a", 1.0, 0.0)
    short = door.wait_seconds("chat")
    for _ in range(8):
        door.arrive("chat", "a", 1.0, 0.0)
    assert door.wait_seconds("chat") > short
    assert Door(0, POOL, 0.0).wait_seconds("chat") == float("inf")
