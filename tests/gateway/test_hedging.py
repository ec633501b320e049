"""Late streams are asked of a second replica: when and within which budget, and over real sockets who wins and what is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gateway.support import DONE, ROLE, Engine, Handler, Loopback, chat, chunk, eventually, loopback, stream
from gateway.test_balancer import Clock, replicas
from npufleet_gateway.balancer import Balancer
from npufleet_gateway.hedging import LATEST_STREAMS, LEAST_STREAMS, MOST_CREDIT, HedgePolicy, Hedges
from npufleet_gateway.prediction import ReplicaFigures

KEY = ("team-a", "chat")
ALWAYS = HedgePolicy(delay_percentile=95, budget_percent=100)


def seen(policy: HedgePolicy, seconds: list[float]) -> Hedges:
    """After so many streams."""
    hedges = Hedges(policy)
    for one in seconds:
        hedges.asked(KEY)
        hedges.began(KEY, one)
    return hedges


@pytest.mark.parametrize(
    ("percentile", "seconds", "delay"),
    [
        (95, [0.1] * (LEAST_STREAMS - 1), None),
        (95, [0.1] * LEAST_STREAMS, 0.1),
        (95, [0.1] * 61 + [9.0] * 3, 0.1),
        (90, [0.1] * 50 + [9.0] * 14, 9.0),
        (99, [number / 100 for number in range(64)], 0.63),
        (50, [number / 100 for number in range(64)], 0.31),
        (95, [9.0] * LATEST_STREAMS + [0.1] * LATEST_STREAMS, 0.1),
    ],
)
def test_a_stream_is_late_after_a_percentile_of_the_latest(percentile: float, seconds: list[float], delay: float | None) -> None:
    assert seen(HedgePolicy(percentile, 5), seconds).asked(KEY) == delay


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 50))
def test_copies_never_exceed_their_share_of_streams(late: list[bool], percent: int) -> None:
    hedges = Hedges(HedgePolicy(budget_percent=percent))
    copies = 0
    for number, one in enumerate(late, start=1):
        hedges.asked(KEY)
        copies += one and hedges.take(KEY)
        assert copies <= number * percent / 100 + 1e-9


def test_a_quiet_model_saves_up_no_more_than_a_few_copies_and_one_that_is_gone_none() -> None:
    hedges = seen(HedgePolicy(budget_percent=50), [0.1] * 1000)
    assert sum(hedges.take(KEY) for _ in range(100)) == MOST_CREDIT
    hedges.give_back(KEY)
    hedges.retain([])
    assert not hedges.take(KEY)


def test_a_spare_is_a_replica_that_nothing_speaks_against() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    first, second, third, fourth = replicas(4)
    balancer.failed(second)
    balancer.reported(third.pod_uid, ReplicaFigures(clock.now, kv_cache_percent=99))
    for _ in range(12):
        assert balancer.acquire([fourth]) is not None
    assert balancer.acquire_spare([first, second, third, fourth], {first.pod_uid}) is None
    lease = balancer.acquire_spare([first, second, third, fourth], ())
    assert lease is not None
    assert lease.replica == first
    assert balancer.acquire_spare([], ()) is None


class Slow:
    """An engine that sends nothing before it is let go; `begun` and `left` count its streams."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        self.left = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.begun += 1

        async def chunks() -> AsyncIterator[bytes]:
            await self.open.wait()
            yield ROLE + chunk("slow") + DONE

        try:
            return await stream(request, chunks())
        except asyncio.CancelledError:
            self.left += 1
            raise


async def warmed(pool: Loopback, handler: Handler) -> Engine:
    """A replica of a model of which enough streams were seen for a delay to be known."""
    hedges = pool.gateway.hedges
    assert hedges is not None
    for _ in range(LEAST_STREAMS):
        hedges.asked(KEY)
        hedges.began(KEY, 0.02)
    return await pool.engine(handler)


def results(pool: Loopback) -> dict[str, float]:
    """What became of late streams."""
    names = ("won", "lost", "over_budget", "busy", "no_replica")
    found = {name: pool.metric("npufleet_gateway_hedges_total", result=name) for name in names}
    return {name: value for name, value in found.items() if value}


async def test_a_late_stream_is_answered_by_another_replica_and_the_first_is_let_go_at_once() -> None:
    async with loopback(hedging=ALWAYS) as pool:
        slow = Slow()
        await warmed(pool, slow)
        quick = await pool.engine()
        for _ in range(4):
            async with pool.stream() as response:
                assert (await response.read()).endswith(DONE)
        await pool.settled()
        assert slow.begun >= 1
        assert len(quick.seen) == 4
        await eventually(lambda: slow.left == slow.begun)
        found = results(pool)
        assert found.get("won", 0) >= 1
        assert set(found) <= {"won", "lost"}, "on a busy machine the quick one may be late as well"
        traffic = pool.traffic()
        assert (traffic.outcomes.ok, traffic.judged, traffic.in_flight) == (4, 4, 0)
        assert pool.metric("npufleet_gateway_admissions_total", result="admitted") == 4
        assert pool.metric("npufleet_gateway_slots_in_use", workload_class="chat") in (0, None)
        assert [pool.gateway.balancer.outstanding(f"pod-r{n}") for n in range(2)] == [0, 0]
        assert pool.metric("npufleet_gateway_retries_total") is None


async def test_when_the_first_answers_after_all_the_copy_is_let_go() -> None:
    async with loopback(hedging=ALWAYS) as pool:
        first, second = Slow(), Slow()
        await warmed(pool, first)
        await pool.engine(second)
        asked = asyncio.ensure_future(pool.stream().__aenter__())
        await eventually(lambda: first.begun + second.begun == 2)
        first.open.set()
        async with await asked as response:
            assert (await response.read()).endswith(DONE)
        await pool.settled()
        await eventually(lambda: first.left + second.left == 1)
        assert results(pool) == {"lost": 1}
        assert pool.traffic().outcomes.ok == 1


@pytest.mark.parametrize("status", [429, 500, 503, 504])
async def test_a_copy_that_fails_leaves_the_first_to_answer(status: int) -> None:
    slow, refused = Slow(), asyncio.Event()

    async def second_refuses(request: web.Request) -> web.StreamResponse:
        if not slow.begun:
            return await slow(request)
        refused.set()
        return web.Response(status=status)

    async with loopback(hedging=ALWAYS) as pool:
        await warmed(pool, second_refuses)
        await pool.engine(second_refuses)
        asked = asyncio.ensure_future(pool.stream().__aenter__())
        await refused.wait()
        slow.open.set()
        async with await asked as response:
            assert (await response.read()).endswith(DONE)
        await pool.settled()
        assert pool.traffic().outcomes.ok == 1


async def test_a_heartbeat_wins_nothing() -> None:
    async with loopback(hedging=ALWAYS) as pool:
        beaten = asyncio.Event()

        async def hung() -> AsyncIterator[bytes]:
            yield b": waiting\n\n"
            beaten.set()
            await asyncio.Event().wait()

        async def first_hangs(request: web.Request) -> web.StreamResponse:
            if sum(len(engine.seen) for engine in pool.engines if isinstance(engine, Engine)) == 1:
                return await stream(request, hung())
            await beaten.wait()
            return await chat(request)

        await warmed(pool, first_hangs)
        await pool.engine(first_hangs)
        async with pool.stream() as response:
            body = await response.read()
        assert body.startswith(b": waiting")
        assert body.endswith(DONE)
        await pool.settled()
        assert pool.traffic().outcomes.ok == 1


async def test_a_client_that_leaves_ends_both() -> None:
    async with loopback(hedging=ALWAYS) as pool:
        first, second = Slow(), Slow()
        await warmed(pool, first)
        await pool.engine(second)
        asked = asyncio.ensure_future(pool.stream().__aenter__())
        await eventually(lambda: first.begun + second.begun == 2)
        asked.cancel()
        await pool.settled()
        await eventually(lambda: first.left + second.left == 2)
        assert [pool.gateway.balancer.outstanding(f"pod-r{n}") for n in range(2)] == [0, 0]
        assert pool.traffic().outcomes.cancelled == 1


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"model": "chat"}, {}),
        ({"model": "chat", "stream": True, "prompt_cache_key": "mine"}, {}),
        ({"model": "chat", "stream": True}, {"x-npufleet-session": "mine"}),
    ],
)
async def test_what_is_no_stream_or_asked_to_stay_is_sent_once(body: dict[str, Any], headers: dict[str, str]) -> None:
    async def late(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await chat(request)

    async with loopback(hedging=ALWAYS) as pool:
        await warmed(pool, late)
        await pool.engine(late)
        async with pool.post(body, headers=headers) as response:
            assert response.status == 200
        await pool.settled()
        assert results(pool) == {}
        assert sum(len(engine.seen) for engine in pool.engines if isinstance(engine, Engine)) == 1


@pytest.mark.parametrize(
    ("settings", "policy", "others", "result"),
    [
        ({}, HedgePolicy(95, 1), 1, "over_budget"),
        ({}, ALWAYS, 0, "no_replica"),
        ({"replica_concurrency": 1}, ALWAYS, 0, "busy"),
    ],
)
async def test_a_copy_that_should_not_be_is_told_and_not_sent(
    settings: dict[str, Any], policy: HedgePolicy, others: int, result: str
) -> None:
    async with loopback(hedging=policy, **settings) as pool:
        slow = Slow()
        await warmed(pool, slow)
        for _ in range(others):
            await pool.engine(slow)
        count = 2 if result == "busy" else 1
        asked = [asyncio.ensure_future(pool.stream().__aenter__()) for _ in range(count)]
        await eventually(lambda: results(pool) == {result: count})
        assert slow.begun == count
        slow.open.set()
        for response in await asyncio.gather(*asked):
            async with response:
                assert (await response.read()).endswith(DONE)


async def test_it_is_off_unless_asked_for() -> None:
    async with loopback() as pool:
        assert pool.gateway.hedges is None


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_is_late_refuses_or_leaves_nothing_stays_behind(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  # a test

    async def moody(request: web.Request) -> web.StreamResponse:
        mood = draw.random()
        if mood < 0.15:
            return web.Response(status=503)
        await asyncio.sleep(draw.choice([0, 0.01, 0.03, 0.06]))
        if mood < 0.3 and request.transport is not None:
            request.transport.abort()
        return await chat(request)

    async with loopback(hedging=ALWAYS, max_attempts=3) as pool:
        await warmed(pool, moody)
        for _ in range(3):
            await pool.engine(moody)

        async def client() -> None:
            async with pool.stream() as response:
                text = await response.read()
                assert response.status in (200, 502, 503)
                assert response.status != 200 or text.endswith(DONE) or b"stream_interrupted" in text

        tasks = [asyncio.create_task(client()) for _ in range(40)]
        await asyncio.sleep(0.03)
        for task in draw.sample(tasks, 8):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        await pool.settled()
        assert [pool.gateway.balancer.outstanding(f"pod-r{n}") for n in range(4)] == [0] * 4
        await eventually(lambda: all(isinstance(engine, Engine) and engine.active == 0 for engine in pool.engines))
        assert pool.metric("npufleet_gateway_slots_in_use", workload_class="chat") in (0, None)
