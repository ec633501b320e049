"""Which replica is next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.balancer import DRAINING_ASIDE_SECONDS, FIRST_ASIDE_SECONDS, LONGEST_ASIDE_SECONDS, Balancer
from npufleet_gateway.routing import Replica, ReplicaState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def replicas(count: int) -> list[Replica]:
    return [Replica("x", f"r{n}", f"pod-{n}", "chat", frozenset(), "10.0.0.1", ReplicaState.READY) for n in range(count)]


def send(balancer: Balancer, among: list[Replica]) -> Replica:
    replica = balancer.pick(among)
    assert replica is not None
    balancer.started(replica)
    return replica


def test_nothing_to_choose_from_gives_nothing() -> None:
    balancer = Balancer(Clock())
    (one,) = replicas(1)
    assert balancer.pick([]) is None
    assert balancer.pick([one], {one.pod_uid}) is None


def test_equals_take_turns() -> None:
    balancer = Balancer(Clock())
    among = replicas(3)
    chosen = []
    for _ in range(9):
        replica = send(balancer, among)
        balancer.finished(replica)
        chosen.append(replica.pod_name)
    assert chosen == ["r0", "r1", "r2"] * 3


def test_a_failed_replica_is_set_aside_for_a_growing_but_bounded_time_and_comes_back() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    bad, good = replicas(2)
    aside = FIRST_ASIDE_SECONDS
    for _ in range(10):
        balancer.failed(bad)
        clock.now += aside * 0.99
        assert [send(balancer, [bad, good]) for _ in range(3)] == [good] * 3
        for _ in range(3):
            balancer.finished(good)
        clock.now += aside * 0.02
        assert balancer.pick([bad, good]) is bad
        aside = min(LONGEST_ASIDE_SECONDS, aside * 2)


def test_success_forgets_failures() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    bad, good = replicas(2)
    for _ in range(5):
        balancer.failed(bad)
    balancer.succeeded(bad)
    assert balancer.pick([bad, good]) is bad
    balancer.failed(bad)
    clock.now += FIRST_ASIDE_SECONDS
    assert balancer.pick([bad, good]) is bad


def test_replicas_set_aside_are_better_than_none() -> None:
    balancer = Balancer(Clock())
    (only,) = replicas(1)
    balancer.failed(only)
    assert balancer.pick([only]) is only


def test_a_draining_replica_is_set_aside_without_a_failure() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    leaving, other = replicas(2)
    balancer.draining(leaving)
    assert balancer.pick([leaving, other]) is other
    clock.now += DRAINING_ASIDE_SECONDS
    assert balancer.pick([leaving, other]) is leaving


def test_replicas_that_are_gone_are_forgotten_once_nothing_is_outstanding() -> None:
    balancer = Balancer(Clock())
    (one,) = replicas(1)
    balancer.started(one)
    balancer.retain(set())
    assert balancer.outstanding(one.pod_uid) == 1
    balancer.finished(one)
    balancer.retain(set())
    assert balancer.outstanding(one.pod_uid) == 0
    balancer.finished(one)
    assert balancer.outstanding(one.pod_uid) == 0


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_no_replica_ever_has_more_outstanding_than_another_plus_one_when_picked(count: int, moves: list[int]) -> None:
    balancer = Balancer(Clock())
    among = replicas(count)
    running: list[Replica] = []
    for move in moves:
        if move > 6 and running:
            balancer.finished(running.pop(move % len(running)))
            continue
        least = min(running.count(one) for one in among)
        chosen = send(balancer, among)
        assert running.count(chosen) == least
        running.append(chosen)
        assert all(balancer.outstanding(one.pod_uid) == running.count(one) for one in among)
