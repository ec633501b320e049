"""The books of all models and classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.accounting import LONG_SECONDS, MAX_CLASSES, SPARE_DEADLINES, Accounting, Tally
from npufleet_api.slo import Exchange, Outcome, SloTargets, judge

TARGETS = SloTargets(ttft_ms=100)
KEY = ("team-a", "chat")


class Books:
    """An accounting with a clock of its own, and what it told of misses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.missed: list[tuple[tuple[str, str], str]] = []
        self.accounting = Accounting(lambda: self.now, 300, lambda: self.now, lambda key, name: self.missed.append((key, name)))

    def start(self, first: list[float] | None = None, name: str = "chat", targets: SloTargets = TARGETS) -> Tally:
        """A stream whose first token comes when `first` gets its time."""
        times = [] if first is None else first
        return self.accounting.started(KEY, name, targets, first_token=lambda: times[0] if times else None)

    def judged(self) -> tuple[int, int]:
        summary = self.accounting.summary(KEY)
        return summary.judged, summary.attained


def ok(ttft_ms: float = 50, elapsed_ms: float = 1000) -> Exchange:
    return Exchange(Outcome.OK, True, elapsed_ms, ttft_ms, 10, prompt_tokens=30, generated_tokens=7)


def test_a_quiet_model_has_no_percentiles_and_zero_counts() -> None:
    accounting = Accounting(lambda: 0.0)
    summary = accounting.summary(KEY)
    assert summary.outcomes.total == summary.judged == summary.in_flight == 0
    assert summary.ttft_p95_ms is None
    assert accounting.classes(KEY) == {}
    assert accounting.history(KEY) is None
    assert accounting.last_request_age_seconds(KEY) is None
    assert [(w.window_seconds, w.judged) for w in accounting.windows(KEY)] == [(60, 0), (3600, 0)]


def test_a_stream_that_still_waits_is_a_miss_the_moment_its_target_passes_and_only_once() -> None:
    books = Books()
    tally = books.start()
    books.now += 0.1
    assert books.judged() == (0, 0)
    books.now += 0.001
    assert books.judged() == (1, 0)
    assert books.missed == [(KEY, "chat")]
    books.now += 1
    assert not books.accounting.finished(tally, ok(ttft_ms=1000)).judged
    assert books.judged() == (1, 0)
    assert books.accounting.summary(KEY).outcomes.ok == 1
    assert [(w.judged, w.attained) for w in books.accounting.windows(KEY)] == [(1, 0), (1, 0)]


def test_a_late_first_token_is_a_miss_before_the_stream_ends() -> None:
    books = Books()
    first: list[float] = []
    books.start(first)
    first.append(books.now + 0.2)
    books.now += 5
    assert books.judged() == (1, 0)


def test_a_stream_whose_first_token_was_in_time_is_judged_at_its_end() -> None:
    books = Books()
    first = [books.now + 0.05]
    tally = books.start(first)
    books.now += 5
    assert books.judged() == (0, 0)
    assert books.accounting.finished(tally, ok()).attained
    assert books.judged() == (1, 1)


def test_a_client_that_leaves_before_its_target_passed_does_not_count_and_after_it_does() -> None:
    books = Books()
    early, late = books.start(), books.start()
    books.now += 0.05
    books.accounting.finished(early, Exchange(Outcome.CANCELLED, True, 50))
    books.now += 1
    books.accounting.finished(late, Exchange(Outcome.CANCELLED, True, 1050))
    assert books.judged() == (1, 0)


def test_what_is_no_stream_or_has_no_target_is_not_watched() -> None:
    books = Books()
    books.accounting.started(KEY, "chat", TARGETS)
    books.start(targets=SloTargets(tpot_ms=10))
    books.now += 100
    assert books.judged() == (0, 0)


def test_the_time_from_arrival_counts_not_from_the_end_of_the_body() -> None:
    books = Books()
    books.accounting.started(KEY, "chat", TARGETS, arrived=books.now - 1, first_token=lambda: None)
    assert books.judged() == (1, 0)


def test_classes_are_told_apart_and_add_up() -> None:
    books = Books()
    for name, ttft in (("chat", 50), ("chat", 500), ("code", 50)):
        books.accounting.finished(books.start([books.now], name), ok(ttft))
    books.start([books.now], "code")
    classes = books.accounting.classes(KEY)
    assert {name: (c.judged, c.attained, c.in_flight) for name, c in classes.items()} == {"chat": (2, 1, 0), "code": (1, 1, 1)}
    summary = books.accounting.summary(KEY)
    assert (summary.judged, summary.attained, summary.in_flight, summary.outcomes.ok) == (3, 2, 1, 3)
    assert [(w.judged, w.attained) for w in books.accounting.windows(KEY, "chat")] == [(2, 1), (2, 1)]


def test_the_short_window_forgets_first_and_the_long_one_last() -> None:
    books = Books()
    books.accounting.finished(books.start([books.now]), ok())
    books.now += 100
    assert [w.judged for w in books.accounting.windows(KEY)] == [0, 1]
    assert books.judged() == (1, 1)
    books.now += 300
    assert books.judged() == (0, 0)
    assert [w.judged for w in books.accounting.windows(KEY)] == [0, 1]
    books.now += LONG_SECONDS
    assert [w.judged for w in books.accounting.windows(KEY)] == [0, 0]


def test_invented_classes_take_no_memory() -> None:
    books = Books()
    for n in range(3 * MAX_CLASSES):
        books.accounting.finished(books.start(name=f"c{n}"), ok())
    assert len(books.accounting.classes(KEY)) == MAX_CLASSES
    assert books.judged() == (3 * MAX_CLASSES, 3 * MAX_CLASSES)


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    books = Books()
    waiting = books.start(targets=SloTargets(ttft_ms=3_600_000))
    for _ in range(3 * SPARE_DEADLINES):
        books.accounting.finished(books.start([books.now], targets=SloTargets(ttft_ms=3_600_000)), ok())
    assert len(books.accounting._deadlines) <= SPARE_DEADLINES + 4
    books.now += 3601
    assert books.judged() == (1, 0)
    assert waiting.missed


def test_in_flight_requests_survive_the_models_removal_until_they_end() -> None:
    books = Books()
    tally = books.start([books.now])
    books.accounting.retain(set())
    assert books.accounting.summary(KEY).in_flight == 1
    books.accounting.finished(tally, ok())
    assert books.accounting.summary(KEY).outcomes.ok == 1
    books.accounting.retain(set())
    assert books.accounting.summary(KEY).outcomes.ok == 0


def test_idle_time_counts_from_the_last_arrival_or_end() -> None:
    books = Books()
    tally = books.start()
    books.now += 5
    assert books.accounting.last_request_age_seconds(KEY) == 5
    books.accounting.finished(tally, ok())
    books.now += 2
    assert books.accounting.last_request_age_seconds(KEY) == 2


def test_history_has_what_was_asked_and_answered() -> None:
    books = Books()
    for _ in range(3):
        books.accounting.finished(books.start([books.now]), ok())
    books.now += 300
    history = books.accounting.history(KEY)
    assert history is not None
    assert [(b.arrivals, b.prompt_tokens, b.generated_tokens) for b in history.buckets] == [(3, 90, 21)]


requests = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.sampled_from(list(Outcome)),
        st.none() | st.floats(0, 0.5),
        st.floats(0, 20),
        st.sampled_from(["chat", "code"]),
        st.sampled_from([TARGETS, SloTargets(), SloTargets(ttft_ms=200, tpot_ms=5)]),
        st.booleans(),
    ),
    max_size=30,
)


@given(requests, st.lists(st.floats(0, 60), max_size=10))
def test_every_request_is_judged_exactly_as_defined_whenever_one_looks(
    arrivals: list[tuple[float, Outcome, float | None, float, str, SloTargets, bool]], looks: list[float]
) -> None:
    books = Books()
    begin = books.now
    events: list[tuple[float, int, int]] = [(at, 2, -1) for at in looks]
    for number, (at, _, first, lasts, _, _, _) in enumerate(arrivals):
        events += [(at, 0, number), (at + max(lasts, first or 0), 1, number)]
    tallies: dict[int, Tally] = {}
    expected = met = counted_late = 0
    for at, kind, number in sorted(events):
        books.now = begin + at
        if kind == 2:
            judged, attained = books.judged()
            assert attained <= judged
            continue
        start, outcome, first, lasts, name, targets, streams = arrivals[number]
        first_at = None if first is None else begin + start + first

        def first_token(first_at: float | None = first_at) -> float | None:
            return first_at if first_at is not None and first_at <= books.now else None

        if kind == 0:
            tallies[number] = books.accounting.started(KEY, name, targets, first_token=first_token if streams else None)
            continue
        elapsed = max(lasts, first or 0) * 1000
        ttft = None if first is None or not streams else first * 1000
        exchange = Exchange(outcome, streams, elapsed, ttft, None)
        judgement = judge(exchange, targets)
        counted = books.accounting.finished(tallies[number], exchange)
        late = streams and targets.ttft_ms is not None and (elapsed if ttft is None else ttft) > targets.ttft_ms * (1 + 1e-9)
        expected += judgement.judged or late
        met += judgement.attained
        counted_late += tallies[number].missed
        assert counted.attained == judgement.attained
    judged, attained = books.judged()
    assert attained == met
    assert len(books.missed) == counted_late
    assert judged == pytest.approx(expected)
