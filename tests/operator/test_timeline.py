"""Clocks that jump, in either direction, on either side of a restart: nothing is cut short, nothing shrinks, nothing crashes."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from npufleet_api.conditions import Reason
from npufleet_api.contract import EngineState
from npufleet_operator.core.observed import EPOCH, EngineProbe
from npufleet_operator.shell.timeline import REACH_SECONDS, Timeline
from support.fleet import DRAIN_SECONDS, START, Fleet, model_spec, pool_spec
from support.load import Load, elastic_spec, run

COOLDOWN = 120
JUMPS = st.sampled_from([timedelta(0), *(sign * timedelta(**{unit: 1}) for unit in ("minutes", "hours", "days") for sign in (-1, 1))])


def draining() -> Fleet:
    """One of two replicas drains, with requests that do not end."""
    fleet = Fleet(timeline=Timeline())
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.settle()
    fleet.busy = set(fleet.pods)
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    assert sum(pod.drain_started is not None for pod in fleet.pods.values()) == 1
    return fleet


def seconds_of_drain(fleet: Fleet, limit: int = 4 * DRAIN_SECONDS) -> float:
    """Until the replica is deleted, by the clock that does not jump, from the first plan after its drain began."""
    for passed in range(limit):
        plan = fleet.step()
        if plan.deletes:
            assert [delete.reason for delete in plan.deletes] == [Reason.DRAIN_DEADLINE]
            return passed + 1
    raise AssertionError(f"the drain did not end within {limit} s")


@pytest.mark.parametrize("jump", [sign * timedelta(seconds=seconds) for seconds in (3, 3600, 365 * 86400) for sign in (-1, 1)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_drain_has_its_time_whatever_the_clock_says(jump: timedelta, restarts: bool) -> None:
    fleet = draining()
    fleet.now += jump
    if restarts:
        fleet.timeline = Timeline()
    assert DRAIN_SECONDS - 1 <= seconds_of_drain(fleet) <= DRAIN_SECONDS + 1


def test_after_a_restart_an_engine_that_is_not_heard_yet_is_waited_for() -> None:
    fleet = draining()
    heard = fleet.probes
    fleet.now += timedelta(days=1)
    fleet.timeline = Timeline()
    fleet.probes = {uid: EngineProbe(None) for uid in heard}
    for _ in range(int(REACH_SECONDS) - 1):
        assert not fleet.step().deletes
        fleet.probes = {uid: EngineProbe(None) for uid in heard}
    fleet.probes = heard
    assert seconds_of_drain(fleet) >= DRAIN_SECONDS - REACH_SECONDS - 1


def test_an_engine_that_is_never_heard_ends_all_the_same() -> None:
    fleet = draining()
    fleet.now += timedelta(days=1)
    fleet.timeline = Timeline()
    for passed in range(int(REACH_SECONDS) + 2):
        fleet.probes = {uid: EngineProbe(None) for uid in fleet.probes}
        if fleet.step().deletes:
            assert passed >= REACH_SECONDS - 1
            return
    raise AssertionError("it was waited for without end")


@given(st.lists(st.tuples(st.integers(1, 9), JUMPS, st.booleans()), max_size=12))
@settings(max_examples=60)
def test_a_drain_is_never_cut_short_and_ends(history: list[tuple[int, timedelta, bool]]) -> None:
    fleet = draining()
    begun = fleet.uptime
    for seconds, jump, restarts in history:
        fleet.now += jump
        if restarts:
            fleet.timeline = Timeline()
        if fleet.step(seconds).deletes:
            break
    else:
        seconds_of_drain(fleet)
    assert DRAIN_SECONDS - 2 <= fleet.uptime - begun <= DRAIN_SECONDS + 2 * 9


def scaled() -> Fleet:
    """Four replicas that came under a load which is gone now; the last was added just before."""
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat"}], rebalancing={"cooldownSeconds": COOLDOWN}), timeline=Timeline())
    fleet.add_model("tiny", elastic_spec())
    run(fleet, {}, 15)
    while fleet.models[("team", "tiny")].status.desired_replicas < 4:
        run(fleet, {"tiny": Load(35)}, 5)
    return fleet


@pytest.mark.parametrize("jump", [timedelta(days=365), timedelta(hours=1), -timedelta(hours=1), -timedelta(days=365)])
def test_a_cooldown_lasts_whatever_the_clock_says(jump: timedelta) -> None:
    fleet = scaled()
    begun = fleet.uptime
    fleet.now += jump
    while not any(plan.drains for plan in run(fleet, {}, 5)):
        assert fleet.uptime - begun < 2 * COOLDOWN, "and it ends"
    assert fleet.uptime - begun >= COOLDOWN - 10


@pytest.mark.parametrize("jump", [timedelta(days=365), -timedelta(days=365)])
def test_replicas_that_load_count_as_supply_whatever_the_clock_says(jump: timedelta) -> None:
    fleet = scaled()
    run(fleet, {"tiny": Load(35)}, 600)
    fleet.auto_ready = False
    run(fleet, {"tiny": Load(55)}, 5)
    wanted = fleet.models[("team", "tiny")].status.desired_replicas
    assert wanted > 4
    fleet.now += jump
    run(fleet, {"tiny": Load(55)}, 20)
    assert fleet.models[("team", "tiny")].status.desired_replicas == wanted
    run(fleet, {"tiny": Load(55)}, 1200)
    assert fleet.models[("team", "tiny")].status.desired_replicas > wanted, "and do not freeze scaling for ever"


def test_what_a_jump_changes_in_status_is_written_once() -> None:
    fleet = scaled()
    fleet.now += timedelta(hours=1)
    run(fleet, {"tiny": Load(35)}, 10)
    before = fleet.models[("team", "tiny")].status.scaling
    run(fleet, {"tiny": Load(35)}, 60)
    after = fleet.models[("team", "tiny")].status.scaling
    assert before is not None
    assert after is not None
    assert (before.last_up_time, before.last_down_time) == (after.last_up_time, after.last_down_time)


def test_while_nothing_jumps_every_time_stays_as_it_is_written() -> None:
    fleet = scaled()
    alone = replace(fleet, timeline=None)
    assert fleet.observe().pods == alone.observe().pods
    assert fleet.observe().models == alone.observe().models


def test_the_load_time_between_two_times_of_a_pod_is_kept() -> None:
    fleet = scaled()
    (before, *_) = fleet.observe().pods
    fleet.now += timedelta(hours=5)
    (after, *_) = fleet.observe().pods
    assert before.ready_since is not None
    assert after.ready_since is not None
    assert after.created != before.created
    assert after.ready_since - after.created == before.ready_since - before.created


@pytest.mark.parametrize("written", [EPOCH, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
@pytest.mark.parametrize("now", [EPOCH, START, datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)])
def test_times_that_nobody_meant_crash_nothing(written: datetime, now: datetime) -> None:
    fleet = draining()
    fleet.timeline = Timeline()
    fleet.now = now
    fleet.pods = {uid: replace(pod, drain_started=written if pod.drain_started else None) for uid, pod in fleet.pods.items()}
    fleet.probes = {uid: EngineProbe(EngineState.DRAINING, running=1, left_seconds=30.0) for uid in fleet.probes}
    observed = fleet.observe()
    assert not fleet.plan().deletes, "the engine says that it has time left"
    alone = replace(fleet, timeline=None)
    alone.plan()
    assert len(observed.pods) == 2
