"""What was asked over the last day."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.history import STRETCH_SECONDS, STRETCHES, History


def test_only_whole_stretches_are_told_and_quiet_ones_between_are_zero() -> None:
    history = History()
    history.arrived(1000)
    assert history.render(1000) is None
    history.ended(1000, 10, 5)
    history.arrived(1900)
    told = history.render(2399)
    assert told is not None
    assert told.end_unix == 2100
    assert [(b.arrivals, b.prompt_tokens, b.generated_tokens) for b in told.buckets] == [(1, 10, 5), (0, 0, 0), (0, 0, 0), (1, 0, 0)]


def test_a_day_later_nothing_is_left() -> None:
    history = History()
    history.arrived(0)
    assert history.render(STRETCHES * STRETCH_SECONDS) is not None
    assert history.render((STRETCHES + 1) * STRETCH_SECONDS) is None


def test_tokens_of_a_request_that_began_long_ago_change_nothing() -> None:
    history = History()
    for number in range(2 * STRETCHES):
        history.arrived(number * STRETCH_SECONDS)
    history.ended(0, 10**6, 10**6)
    told = history.render(2 * STRETCHES * STRETCH_SECONDS)
    assert told is not None
    assert sum(bucket.prompt_tokens for bucket in told.buckets) == 0


def test_a_lying_engine_cannot_break_the_report() -> None:
    history = History()
    history.arrived(0)
    history.ended(0, 10**18, 10**18)
    told = history.render(STRETCH_SECONDS)
    assert told is not None
    assert told.buckets[0].prompt_tokens == 10**15


@given(st.lists(st.floats(0, 200_000), max_size=50), st.integers(1, 4))
def test_gateways_histories_add_up_to_what_one_would_have_seen(times: list[float], gateways: int) -> None:
    one, several = History(), [History() for _ in range(gateways)]
    for number, time in enumerate(sorted(times)):
        for history in (one, several[number % gateways]):
            history.arrived(time)
            history.ended(time, 3, 1)
    now = 200_000.0
    whole = one.render(now)
    parts = [told for history in several if (told := history.render(now)) is not None]
    assert (whole is None) == (not parts)
    if whole is not None:
        assert {part.end_unix for part in parts} == {whole.end_unix}
        for back in range(1, len(whole.buckets) + 1):
            found = [part.buckets[-back] for part in parts if len(part.buckets) >= back]
            assert sum(bucket.arrivals for bucket in found) == whole.buckets[-back].arrivals
            assert sum(bucket.prompt_tokens for bucket in found) == whole.buckets[-back].prompt_tokens


@given(st.lists(st.tuples(st.floats(-1000, 10**6), st.floats(0, 10**6)), max_size=40))
def test_whatever_the_clock_does_memory_and_length_are_bounded(steps: list[tuple[float, float]]) -> None:
    history = History()
    for time, now in steps:
        history.arrived(time)
        told = history.render(now)
        assert told is None or (0 < len(told.buckets) <= STRETCHES and told.end_unix <= now)
    assert len(history._stretches) <= STRETCHES + 1
