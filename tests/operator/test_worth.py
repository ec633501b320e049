"""What a replica more or fewer is worth, and how much more load replicas carry: predictions, one case each."""

from __future__ import annotations

from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_api.model import AttainedAt, Slo
from npufleet_api.report import DataState
from npufleet_operator.core.autoscale.prediction import MARGIN, MOST_HEADROOM, headroom, unsafe_to_remove
from npufleet_operator.core.autoscale.signals import ReplicaSignals, Signals
from npufleet_operator.core.autoscale.worth import Worth, needed, remember, worth

SLO = Slo(ttft_milliseconds=1000, tpot_milliseconds=50)


def replica(running: int = 8, waiting: int = 0, **changes: object) -> ReplicaSignals:
    """One replica that meets its targets."""
    figures = {
        "uid": "a", "in_flight": running + waiting, "running": running, "waiting": waiting, "ttft_p50_ms": 100.0, "ttft_p95_ms": 200.0,
        "tpot_p50_ms": 20.0, "tpot_p95_ms": 25.0, "compute": 0.2, "kv_cache": 0.3, "work_per_second": 100.0, "load_seconds": 5.0,
    }  # fmt: skip
    return ReplicaSignals(**{**figures, **changes})  # type: ignore[arg-type]  # figures by name


def model(attained: float, replicas: list[ReplicaSignals], in_flight: int = 0) -> Signals:
    """A model with a request judged per second."""
    return Signals(
        DataState.FRESH, len(replicas), tuple(replicas), attainment=attained, judged=300, lasting=attained, judged_per_second=1.0,
        window_seconds=60, in_flight=in_flight or sum(r.in_flight for r in replicas),
    )  # fmt: skip


def test_the_odds_of_a_miss_fall_with_the_square_of_the_replicas() -> None:
    found = worth(model(0.5, [replica()] * 4), SLO)
    assert found is not None
    assert found.gain == pytest.approx(1 / (1 + (4 / 5) ** 2) - 0.5)
    assert found.loss == pytest.approx(0.5 - 1 / (1 + (4 / 3) ** 2))


@pytest.mark.parametrize(("attained", "replicas"), [(0.95, 4), (1.0, 4), (0.5, 1)])
def test_none_may_be_taken_from_a_kept_promise_or_of_the_last_one(attained: float, replicas: int) -> None:
    found = worth(model(attained, [replica()] * replicas), SLO)
    assert found is not None
    assert found.loss == inf


def test_of_replicas_that_are_short_each_is_worth_its_part() -> None:
    overloaded = [replica(running=10, waiting=10)] * 2
    assert needed(overloaded, 40, SLO) == 4
    found = worth(model(0.0, overloaded), SLO)
    assert found is not None
    assert found.gain == pytest.approx(1 / 2)
    assert found.loss == pytest.approx(1 / 3)


def test_a_replica_that_is_too_slow_carries_fewer_than_it_runs() -> None:
    assert needed([replica(running=20, tpot_p95_ms=100.0)] * 2, 40, SLO) == 4


@pytest.mark.parametrize(
    "replicas",
    [[], [replica()], [replica(waiting=3), replica()], [replica(running=20, waiting=1)]],
    ids=["none", "fine", "one has no queue", "a queue within the tolerance"],
)
def test_without_an_overload_none_are_short(replicas: list[ReplicaSignals]) -> None:
    assert needed(replicas, sum(r.in_flight for r in replicas), SLO) == 0


def test_what_next_to_nobody_gains_is_worth_nothing() -> None:
    found = worth(model(0.001, [replica()] * 4), SLO)
    assert found is not None
    assert found.gain == 0


@pytest.mark.parametrize("changes", [{"attainment": None}, {"lasting": None}, {"ready": 0}])
def test_nothing_is_said_where_too_little_was_judged(changes: dict[str, object]) -> None:
    s = model(0.5, [replica()] * 4)
    figures = {name: getattr(s, name) for name in s.__dataclass_fields__}
    assert worth(Signals(**{**figures, **changes}), SLO) is None


def test_what_was_measured_is_believed_under_the_same_load_only() -> None:
    s = model(0.5, [replica()] * 4)
    useless = AttainedAt(replicas=5, percent=50, requests_per_minute=60)
    ruin = AttainedAt(replicas=3, percent=0, requests_per_minute=70)
    found = worth(s, SLO, [useless, ruin])
    assert found is not None
    assert found.gain == 0
    assert found.loss == pytest.approx(0.5)
    other_load = [a.model_copy(update={"requests_per_minute": 600}) for a in (useless, ruin)]
    assert worth(s, SLO, other_load) == worth(s, SLO)


def test_the_latest_of_each_number_is_remembered_and_few_of_them() -> None:
    known: list[AttainedAt] = []
    for n in (*range(1, 12), 5):
        known = remember(known, model(n / 20, [replica()] * n))
    assert [a.replicas for a in known] == [4, 6, 7, 8, 9, 10, 11, 5]
    assert known[-1] == AttainedAt(replicas=5, percent=25, requests_per_minute=60)


SHARES = st.floats(0.0, 1.0)


@given(
    st.lists(
        st.builds(
            replica,
            running=st.integers(1, 50),
            waiting=st.sampled_from([0, 0, 3]),
            ttft_p95_ms=st.floats(1, 3000),
            tpot_p95_ms=st.floats(1, 200),
            compute=SHARES,
            kv_cache=SHARES,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_headroom_ends_where_a_removal_would_be_unsafe(replicas: list[ReplicaSignals]) -> None:
    found = headroom(replicas, SLO)
    assert 1 <= found <= MOST_HEADROOM
    steps = 10_000
    if found > 1.001:
        assert not unsafe_to_remove(replicas, int(steps * found * 0.999), steps, SLO)
    if found < MOST_HEADROOM:
        assert unsafe_to_remove(replicas, int(steps * found * 1.001) + 1, steps, SLO)


def test_a_replica_that_was_not_measured_has_no_headroom() -> None:
    assert headroom([replica(ttft_p95_ms=None)], SLO) == 1
    assert headroom([replica(compute=None)], SLO) == 1
    assert headroom([replica(running=0)], SLO) == 1
    assert headroom([replica(tpot_p95_ms=10.0)], SLO) == pytest.approx(MARGIN / 0.3)


@pytest.mark.parametrize(("replicas", "loss"), [(1, inf), (3, 0.0)])
def test_a_model_without_a_promise_borrows_what_others_leave(replicas: int, loss: float) -> None:
    found = worth(model(0.2, [replica(waiting=20)] * replicas), None)
    assert found == Worth(gain=0.0, loss=loss)
