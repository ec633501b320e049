"""One replica: batching, memory, drain; and that every request ends once."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.slo import Outcome
from npufleet_operator.simulator.constants import DEVICES
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.replica import Replica, ReplicaLimits
from npufleet_operator.simulator.request import Request
from npufleet_operator.simulator.roofline import Roofline, decode, prefill
from npufleet_operator.simulator.shapes import SHAPES

KEY = ("team", "m")
ROOFLINE = Roofline(DEVICES["910B3"], SHAPES["qwen-14b"], 1)
LIMITS = ReplicaLimits(max_sequences=64, max_batched_tokens=2048, max_queued=256, chunked_prefill=True)


class Clients:
    """Sends requests and keeps when and how they ended."""

    def __init__(self, limits: ReplicaLimits = LIMITS) -> None:
        self.clock = Clock()
        self.replica = Replica(self.clock, ROOFLINE, limits)
        self.sent: list[Request] = []
        self.ends: list[tuple[float, Request, Outcome]] = []
        self.retried: list[Request] = []

    def request(self, input_tokens: int, output_tokens: int) -> Request:
        def ended(request: Request, outcome: Outcome) -> None:
            self.ends.append((self.clock.now, request, outcome))

        return Request(KEY, self.clock.now, input_tokens, output_tokens, ended, self.retried.append)

    def send(self, input_tokens: int, output_tokens: int, at: float = 0.0) -> Request:
        request = self.request(input_tokens, output_tokens)
        request.arrived = at
        self.sent.append(request)
        self.clock.at(at, lambda: self._arrive(request))
        return request

    def _arrive(self, request: Request) -> None:
        if not self.replica.accept(request):
            request.end(Outcome.SERVER_ERROR)


def test_a_request_alone_takes_its_prompt_and_then_a_step_per_token() -> None:
    clients = Clients()
    request = clients.send(1000, 101)
    clients.clock.run(100)
    first = ROOFLINE.step_seconds(prefill(0, 1000))
    assert request.first_token == pytest.approx(first)
    steps = sum(ROOFLINE.step_seconds(decode(1, 1001 + i)) for i in range(100))
    ((ended, *end),) = clients.ends
    assert ended == pytest.approx(first + steps)
    assert end == [request, Outcome.OK]


def test_a_long_prompt_comes_in_chunks() -> None:
    clients = Clients()
    request = clients.send(5000, 1)
    clients.clock.run(100)
    expected = sum(ROOFLINE.step_seconds(prefill(start, tokens)) for start, tokens in ((0, 2048), (2048, 2048), (4096, 904)))
    assert request.first_token == pytest.approx(expected)


def test_a_newcomer_starts_at_the_end_of_the_step_under_way() -> None:
    clients = Clients()
    clients.send(100, 400)
    late = clients.send(100, 10, at=5.0)
    clients.clock.run(100)
    step = ROOFLINE.step_seconds(decode(1, 500))
    both = ROOFLINE.step_seconds(prefill(0, 400))
    assert late.first_token is not None
    assert 5.0 < late.first_token <= 5.0 + step + both
    assert clients.ends[0][1] is late


def test_memory_bounds_what_runs_at_once() -> None:
    clients = Clients()
    half = ROOFLINE.kv_tokens // 2 - 100
    requests = [clients.send(half, 50) for _ in range(3)]
    seen: list[int] = []

    def look() -> None:
        seen.append(clients.replica.running)
        if len(clients.ends) < 3:
            clients.clock.after(0.01, look)

    clients.clock.after(0.01, look)
    clients.clock.run(1000)
    assert max(seen) == 2
    assert [end[1] for end in clients.ends][-1] is requests[2]


def test_a_request_that_never_fits_ends_at_once() -> None:
    clients = Clients()
    clients.send(ROOFLINE.kv_tokens, 10)
    clients.clock.run(1)
    assert [outcome for _, _, outcome in clients.ends] == [Outcome.CLIENT_ERROR]


def test_a_full_queue_refuses() -> None:
    clients = Clients(ReplicaLimits(max_sequences=1, max_batched_tokens=2048, max_queued=2, chunked_prefill=True))
    for _ in range(5):
        clients.send(10, 1000)
    clients.clock.run(1000)
    outcomes = [outcome for _, _, outcome in clients.ends]
    assert outcomes.count(Outcome.SERVER_ERROR) == 2
    assert outcomes.count(Outcome.OK) == 3


def test_a_draining_replica_finishes_what_it_has_and_takes_nothing_new() -> None:
    clients = Clients()
    clients.send(10, 50)
    clients.clock.run(0.01)
    clients.replica.draining = True
    assert not clients.replica.accept(clients.request(10, 10))
    clients.clock.run(100)
    assert [outcome for _, _, outcome in clients.ends] == [Outcome.OK]


def test_what_waits_on_a_draining_replica_can_be_handed_back() -> None:
    clients = Clients(ReplicaLimits(max_sequences=1, max_batched_tokens=2048, max_queued=9, chunked_prefill=True))
    streaming, waiting = clients.send(10, 1000), clients.send(10, 10)
    clients.clock.run(1)
    clients.replica.hand_back()
    assert clients.retried == []
    clients.replica.draining = True
    clients.replica.hand_back()
    assert clients.retried == [waiting]
    clients.clock.run(1000)
    assert [(request, outcome) for _, request, outcome in clients.ends] == [(streaming, Outcome.OK)]


def test_a_replica_that_stops_interrupts_streams_and_hands_back_what_waits() -> None:
    clients = Clients(ReplicaLimits(max_sequences=1, max_batched_tokens=2048, max_queued=9, chunked_prefill=True))
    streaming, waiting = clients.send(10, 1000), clients.send(10, 10)
    clients.clock.run(1)
    clients.replica.stop()
    assert [(request, outcome) for _, request, outcome in clients.ends] == [(streaming, Outcome.INTERRUPTED)]
    assert clients.retried == [waiting]
    clients.clock.run(1000)
    assert len(clients.ends) == 1


def test_what_is_counted_is_what_was_computed() -> None:
    clients = Clients()
    for index in range(20):
        clients.send(100 + index, 10 + index, at=index / 7)
    clients.clock.run(1000)
    totals = clients.replica.totals
    assert totals.prompt_tokens == sum(request.input_tokens for request in clients.sent)
    assert totals.generation_tokens == sum(request.output_tokens for request in clients.sent)
    assert clients.replica.kv_share == 0


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 6000), st.integers(1, 300)), min_size=1, max_size=40),
    st.integers(1, 8),
    st.booleans(),
    st.one_of(st.none(), st.floats(0, 30)),
)
def test_every_request_ends_once_in_order_of_its_tokens(
    arrivals: list[tuple[float, int, int]], sequences: int, chunked: bool, stop_at: float | None
) -> None:
    clients = Clients(ReplicaLimits(max_sequences=sequences, max_batched_tokens=4096, max_queued=20, chunked_prefill=chunked))
    for at, prompt, answer in arrivals:
        clients.send(prompt, answer, at)
    if stop_at is not None:
        clients.clock.at(stop_at, clients.replica.stop)
    clients.clock.run(10_000)
    assert len(clients.ends) + len(clients.retried) == len(arrivals)
    for now, request, outcome in clients.ends:
        if outcome is Outcome.OK:
            assert request.first_token is not None
            assert request.arrived < request.first_token <= now
            least = sum(ROOFLINE.step_seconds(decode(1, request.input_tokens + i)) for i in range(1, request.output_tokens))
            assert now - request.first_token >= least * (1 - 1e-9)
    assert clients.replica.outstanding == 0
