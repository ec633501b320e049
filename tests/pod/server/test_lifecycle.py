from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from npufleet_api.contract import EngineState
from npufleet_pod.engine.stats import EngineSnapshot
from npufleet_pod.errors import NotReadyError
from npufleet_pod.server.lifecycle import Lifecycle


class Load:
    def __init__(self) -> None:
        self.running, self.waiting, self.ended = 0, 0, asyncio.Event()
        self.order: list[str] = []

    def hand_back(self) -> None:
        self.order.append("handed back")

    def end_all(self) -> None:
        self.order.append("ended")
        self.ended.set()

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(self.running, self.waiting, 0.0)


@pytest.fixture
async def load() -> Load:
    return Load()


@pytest.fixture
def lifecycle(load: Load) -> Iterator[Lifecycle]:
    one = Lifecycle(load.snapshot, load.hand_back, load.end_all)
    yield one
    one.close()


async def test_work_is_refused_while_loading_and_taken_when_loaded(lifecycle: Lifecycle) -> None:
    assert (lifecycle.state, lifecycle.unready_reason) == (EngineState.LOADING, "loading")
    with pytest.raises(NotReadyError) as caught:
        lifecycle.check_admits()
    assert not caught.value.draining
    lifecycle.loaded()
    assert (lifecycle.state, lifecycle.unready_reason) == (EngineState.READY, None)
    with lifecycle.admit():
        assert lifecycle.admin_state().running == 1


async def test_a_drain_refuses_new_work_and_is_idle_when_the_last_byte_is_sent(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    with lifecycle.admit():
        lifecycle.drain(60)
        assert lifecycle.admin_state().state is EngineState.DRAINING
        assert lifecycle.unready_reason == "draining"
        with pytest.raises(NotReadyError) as caught:
            lifecycle.check_admits()
        assert caught.value.draining
        state = lifecycle.admin_state()
        assert state.running == 1
        assert state.drain_deadline_seconds is not None
        assert 0 < state.drain_deadline_seconds <= 60
        idle = asyncio.create_task(lifecycle.wait_until(EngineState.IDLE))
        await asyncio.sleep(0)
        assert not idle.done()
    await idle
    assert not load.ended.is_set()


async def test_of_several_deadlines_the_earliest_holds(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    with lifecycle.admit():
        lifecycle.drain(3600)
        lifecycle.drain(0)
        lifecycle.drain(3600)
        await load.ended.wait()
        assert lifecycle.admin_state().drain_deadline_seconds == 0


async def test_what_waits_is_handed_back_before_what_runs_is_given_up(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    with lifecycle.admit():
        lifecycle.drain(0.2)
        await load.ended.wait()
    assert load.order == ["handed back", "handed back", "ended"]


async def test_a_drain_without_time_hands_back_what_waits_before_it_gives_up_what_runs(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    with lifecycle.admit():
        lifecycle.drain(0)
        await load.ended.wait()
    assert load.order[0] == "handed back"
    assert load.order[-1] == "ended"


async def test_a_cancelled_drain_takes_work_again_and_ends_nothing(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    lifecycle.drain(0)
    assert lifecycle.cancel_drain()
    assert lifecycle.admin_state().state is EngineState.READY
    await asyncio.sleep(0.01)
    assert not load.ended.is_set()
    with lifecycle.admit():
        pass


async def test_a_replica_told_to_end_is_unready_yet_takes_work_until_it_drains(lifecycle: Lifecycle) -> None:
    lifecycle.loaded()
    lifecycle.terminate()
    assert lifecycle.unready_reason == "terminating"
    with lifecycle.admit():
        pass
    lifecycle.drain(10)
    assert not lifecycle.cancel_drain()
    assert lifecycle.admin_state().state is EngineState.IDLE


async def test_a_drain_while_loading_is_idle_and_stays_drained(lifecycle: Lifecycle) -> None:
    lifecycle.drain(10)
    assert lifecycle.admin_state().state is EngineState.IDLE
    lifecycle.loaded()
    assert lifecycle.admin_state().state is EngineState.IDLE
    assert lifecycle.cancel_drain()
    assert lifecycle.admin_state().state is EngineState.READY


async def test_running_counts_what_the_engine_does_not_hold_any_more(lifecycle: Lifecycle, load: Load) -> None:
    lifecycle.loaded()
    with lifecycle.admit(), lifecycle.admit(), lifecycle.admit():
        load.running, load.waiting = 1, 1
        state = lifecycle.admin_state()
        assert (state.running, state.waiting) == (2, 1)
        load.running, load.waiting = 9, 2
        assert lifecycle.admin_state().running == 9
