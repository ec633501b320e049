"""The circuit breaker's states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.breaker import DRAINING_SECONDS, FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS, Breaker, BreakerState


def test_a_failure_opens_and_time_half_opens() -> None:
    breaker = Breaker()
    assert breaker.state(0) is BreakerState.CLOSED
    breaker.failed(0)
    assert breaker.state(FIRST_OPEN_SECONDS * 0.99) is BreakerState.OPEN
    assert not breaker.lets_through(FIRST_OPEN_SECONDS * 0.99)
    assert breaker.state(FIRST_OPEN_SECONDS) is BreakerState.HALF_OPEN
    assert breaker.lets_through(FIRST_OPEN_SECONDS)


def test_half_open_lets_one_request_through_at_a_time() -> None:
    breaker = Breaker()
    breaker.failed(0)
    breaker.probing = True
    assert not breaker.lets_through(1)
    breaker.succeeded()
    assert breaker.state(1) is BreakerState.CLOSED
    assert breaker.lets_through(1)


def test_a_probe_that_fails_opens_for_twice_as_long_up_to_a_limit() -> None:
    breaker = Breaker()
    now, seconds = 0.0, FIRST_OPEN_SECONDS
    for _ in range(12):
        breaker.failed(now)
        assert breaker.open_until == pytest.approx(now + seconds)
        now, seconds = breaker.open_until, min(LONGEST_OPEN_SECONDS, seconds * 2)
    assert seconds == LONGEST_OPEN_SECONDS


def test_requests_that_were_under_way_when_it_opened_say_nothing_new() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.failed(0)
    assert breaker.open_until == FIRST_OPEN_SECONDS


def test_draining_is_no_failure() -> None:
    breaker = Breaker()
    breaker.draining(0)
    assert breaker.state(DRAINING_SECONDS / 2) is BreakerState.OPEN
    assert breaker.state(DRAINING_SECONDS) is BreakerState.CLOSED


@given(st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["failed", "succeeded", "draining"])), max_size=40))
def test_whatever_happens_it_lets_a_request_through_within_the_longest_time(events: list[tuple[float, str]]) -> None:
    breaker = Breaker()
    now = 0.0
    for seconds, event in events:
        now += seconds
        if event == "succeeded":
            breaker.succeeded()
        else:
            getattr(breaker, event)(now)
        assert breaker.lets_through(now + LONGEST_OPEN_SECONDS)
