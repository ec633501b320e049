"""Restart delays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from devcluster.backoff import Backoff


def test_a_crash_loop_slows_down_to_ten_seconds_and_a_steady_process_starts_over() -> None:
    backoff = Backoff()
    assert [round(backoff.after(0.1), 1) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(30.0) == 0.2
    assert backoff.after(0.1) == 0.4


@given(st.lists(st.floats(0, 1e6)))
def test_the_delay_is_always_positive_and_bounded(lives: list[float]) -> None:
    backoff = Backoff()
    assert all(0 < backoff.after(seconds) <= 10 for seconds in lives)
