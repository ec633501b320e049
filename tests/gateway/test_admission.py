"""Admission through a running gateway: queues, deadlines, fairness, and no slot that leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from gateway.support import DONE, ROLE, Engine, Loopback, chat, chunk, eventually, loopback, stream
from npufleet_api import API_VERSION, POOL_KIND
from npufleet_api.report import EngineFigures
from npufleet_gateway.admission import Admission, Entry
from npufleet_gateway.entitlement import ClassPolicy
from npufleet_gateway.errors import ApiError
from npufleet_gateway.policy import FellowStore, PoolStore
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.slots import next_estimate, with_slack

KEY = ("team-a", "chat")
CLASSES: list[dict[str, Any]] = [
    {"name": "chat", "priority": 3, "minPercent": 20, "maxPercent": 50, "claimable": True},
    {"name": "document", "priority": 2, "minPercent": 30, "maxPercent": 60, "claimable": True},
    {"name": "code", "priority": 1, "minPercent": 10, "maxPercent": 40, "claimable": True},
]


def pool_object(name: str = "prod", *, classes: list[dict[str, Any]] | None = None, **status: Any) -> dict[str, Any]:
    """An InferencePool as the API server sends it."""
    spec = {"npus": {"resourceName": "huawei.com/Ascend910"}, "classes": CLASSES if classes is None else classes}
    return {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": name}, "spec": spec, "status": status}


class Gate:
    """An engine whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        await self.open.wait()
        return await chat(request)


@contextlib.asynccontextmanager
async def narrow(**settings: Any) -> AsyncIterator[tuple[Loopback, Gate]]:
    """A gateway with one replica of two slots (its concurrency and the slack)."""
    async with loopback(replica_concurrency=1, **settings) as pool:
        pool.gateway.pool.replace([pool_object()])
        gate = Gate()
        await pool.engine(gate)
        try:
            yield pool, gate
        finally:
            gate.open.set()


async def test_more_than_the_replicas_take_wait_and_are_then_served() -> None:
    async with narrow() as (pool, gate):
        engine = pool.engines[0]
        assert isinstance(engine, Engine)
        requests = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(6)]
        await eventually(lambda: pool.gateway.live_requests == 6)
        await eventually(lambda: sum(pool.gateway.admission.in_queue(KEY).values()) == 4)
        await eventually(lambda: engine.active == 2)
        gate.open.set()
        assert [response.status for response in await asyncio.gather(*requests)] == [200] * 6
        for request in requests:
            request.result().close()
        await pool.settled()
        assert pool.traffic().outcomes.ok == 6


async def test_a_wait_ends_at_its_deadline_with_a_429_that_is_a_miss() -> None:
    async with narrow(queue_seconds=30.0) as (pool, gate):
        held = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(2)]
        await eventually(lambda: pool.gateway.live_requests == 2)
        async with pool.post(headers={"x-npufleet-deadline-ms": "50"}) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1
            error = (await response.json())["error"]
        assert error["code"] == "capacity_exceeded"
        gate.open.set()
        for response in await asyncio.gather(*held):
            response.close()
        await pool.settled()
        traffic = pool.traffic()
        assert (traffic.outcomes.overloaded, traffic.judged, traffic.attained) == (1, 3, 2)


async def test_a_full_queue_refuses_at_once() -> None:
    async with narrow(max_queued=1) as (pool, gate):
        held = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(3)]
        await eventually(lambda: sum(pool.gateway.admission.in_queue(KEY).values()) == 1)
        async with pool.post() as response:
            assert response.status == 429
            assert "wait already" in (await response.json())["error"]["message"]
        gate.open.set()
        for response in await asyncio.gather(*held):
            response.close()


async def test_a_client_that_leaves_the_queue_or_its_slot_leaves_nothing_behind() -> None:
    async with narrow() as (pool, gate):
        requests = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(5)]
        await eventually(lambda: sum(pool.gateway.admission.in_queue(KEY).values()) == 3)
        for request in (requests[0], requests[4], requests[2]):
            request.cancel()
        await eventually(lambda: pool.gateway.live_requests == 2)
        gate.open.set()
        served = [
            response for response in await asyncio.gather(*requests, return_exceptions=True) if not isinstance(response, BaseException)
        ]
        assert len(served) == 2
        for response in served:
            response.close()
        await pool.settled()
        async with pool.post() as response:
            assert response.status == 200


@pytest.mark.parametrize("seed", range(20))
async def test_no_slot_leaks_wherever_a_request_is_cancelled(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  # a test
    classes = {name: ClassPolicy(name, number, 0.2) for number, name in enumerate("abc")}
    loop = asyncio.get_running_loop()
    admission = Admission(loop.time, GatewaySettings("p", "g", queue_seconds=0.02, max_queued=20), lambda _: 3, lambda: classes)
    inside = 0
    most = 0

    async def one() -> None:
        nonlocal inside, most
        entry = Entry(KEY, draw.choice("abc"), draw.choice("xy"), 1.0, draw.choice([None, 0.001]))
        with contextlib.suppress(ApiError):
            async with admission.admit(entry):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(draw.choice([0, 0.001, 0.003]))
                finally:
                    inside -= 1

    tasks = []
    for _ in range(120):
        tasks.append(asyncio.create_task(one()))
        if draw.random() < 0.3:
            await asyncio.sleep(draw.choice([0, 0, 0.001]))
        if draw.random() < 0.4:
            draw.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (inside, most) == (0, 3)
    door = admission._doors[KEY]
    assert (door.running, door.queued) == (0, 0)
    assert not admission._waiting


async def test_who_waits_who_came_in_who_was_refused_and_what_is_lent_stand_in_the_metrics() -> None:
    async with narrow(max_queued=2) as (pool, gate):
        labels = {"namespace": "team-a", "model": "chat", "workload_class": "chat"}

        def admissions(result: str) -> float | None:
            return pool.metric("npufleet_gateway_admissions_total", **labels, result=result)

        held = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(4)]
        await eventually(lambda: pool.metric("npufleet_gateway_queue_length", **labels) == 2)
        assert pool.metric("npufleet_gateway_slots", model="chat") == 2
        assert pool.metric("npufleet_gateway_slots_in_use", **labels) == 2
        guaranteed = pool.metric("npufleet_gateway_slots_guaranteed", **labels)
        assert guaranteed == pytest.approx(2 * 0.2)
        assert pool.metric("npufleet_gateway_slots_borrowed", **labels) == pytest.approx(2 - 2 * 0.2)
        assert pool.metric("npufleet_gateway_slots_borrowed", **labels | {"workload_class": "code"}) == 0
        async with pool.post() as response:
            assert response.status == 429
        async with pool.post(headers={"x-npufleet-deadline-ms": "20", "x-npufleet-class": "code"}) as response:
            assert response.status == 429
        held.pop().cancel()
        await eventually(lambda: admissions("client_left") == 1)
        gate.open.set()
        for response in await asyncio.gather(*held):
            response.close()
        await pool.settled()
        assert (admissions("admitted"), admissions("queue_full"), admissions("deadline_passed")) == (3, 1, 0)
        assert pool.metric("npufleet_gateway_admissions_total", workload_class="code", result="deadline_passed") == 1
        assert pool.metric("npufleet_gateway_queue_seconds_count", **labels) == 5
        assert pool.metric("npufleet_gateway_queue_length", **labels) == 0
        async with pool.post({"model": "none"}) as response:
            assert response.status == 404
        assert pool.metric("npufleet_gateway_rejected_total", status="404", cause="model_not_found") == 1
        pool.models = []
        pool.publish()
        assert pool.metric("npufleet_gateway_slots") is None
        assert pool.metric("npufleet_gateway_admissions_total") is None
        assert pool.metric("npufleet_gateway_queue_seconds_count") is None


async def test_a_queue_moves_on_when_replicas_come() -> None:
    async with narrow() as (pool, gate):
        held = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(5)]
        await eventually(lambda: sum(pool.gateway.admission.in_queue(KEY).values()) == 3)
        await pool.engine(chat)
        await eventually(lambda: pool.gateway.admission.in_queue(KEY) == {"chat": 0, "document": 0, "code": 0})
        gate.open.set()
        for response in await asyncio.gather(*held):
            response.close()


async def test_three_classes_that_saturate_a_model_get_their_entitlements() -> None:
    held: Counter[str] = Counter()
    count = 0
    enough = asyncio.Event()

    async def engine(request: web.Request) -> web.StreamResponse:
        nonlocal count
        await asyncio.sleep(0.02)
        count += 1
        door = pool.gateway.admission._doors[KEY]
        if count > 100:
            held.update({name: door.running_of(name) for name in ("chat", "document", "code")})
        if count > 700:
            enough.set()
        return await stream(request, tokens())

    async def tokens() -> AsyncIterator[bytes]:
        yield ROLE + chunk("one") + DONE

    async with loopback(replica_concurrency=18) as pool:
        pool.gateway.pool.replace([pool_object()])
        await pool.engine(engine)

        async def client(name: str) -> None:
            while not enough.is_set():
                async with pool.post({"model": "chat", "stream": True}, headers={"x-npufleet-class": name}) as response:
                    assert response.status == 200
                    await response.read()

        async with asyncio.TaskGroup() as group:
            for name in ("chat", "document", "code"):
                for _ in range(25):
                    group.create_task(client(name))
    total = sum(held.values())
    for name, share in (("chat", 0.5), ("document", 0.4), ("code", 0.1)):
        assert held[name] / total == pytest.approx(share, abs=0.05)


async def test_a_class_that_may_not_be_claimed_reaches_no_replica_and_headers_for_the_gateway_stay_here() -> None:
    async with loopback() as pool:
        pool.gateway.pool.replace([pool_object(classes=[{"name": "chat"}, {"name": "document", "claimable": True}])])
        engine = await pool.engine()
        async with pool.post(headers={"x-npufleet-class": "chat"}) as response:
            assert response.status == 403
        async with pool.post(headers={"x-npufleet-class": "other"}) as response:
            assert response.status == 400
        async with pool.post({"model": "chat", "priority": -7}, headers={"x-npufleet-class": "document"}) as response:
            assert response.status == 200
        assert len(engine.seen) == 1
        assert "x-npufleet-class" not in engine.seen[0]
        assert json.loads(engine.bodies[0])["priority"] == 0


def test_the_pools_classes_follow_its_spec_and_shrink_with_its_ledger() -> None:
    store = PoolStore("prod")
    store.replace([pool_object("other", classes=[{"name": "x"}]), pool_object()])
    assert store.classes["chat"] == ClassPolicy("chat", 3, 0.2, 0.5, claimable=True)
    entry = {"name": "document", "ceiling": 9, "used": 0, "borrowed": 0, "draining": 0, "pending": 0}
    store.apply("MODIFIED", pool_object(nominal=16, classes=None) | {"status": {"nominal": 16, "classes": [entry | {"guaranteed": 4}]}})
    assert store.classes["document"].share == 0.3
    store.apply("MODIFIED", pool_object() | {"status": {"nominal": 16, "classes": [entry | {"guaranteed": 2}]}})
    assert store.classes["document"].share == 0.125
    before = store.classes
    store.apply("MODIFIED", pool_object() | {"spec": {"classes": "no"}})
    store.apply("DELETED", pool_object())
    assert store.classes is before
    assert store.unparsable == 1


def test_ready_gateways_of_the_pool_are_counted() -> None:
    def pod(name: str, *, ready: bool = True, pool: str = "prod", component: str = "gateway", **more: Any) -> dict[str, Any]:
        metadata = {
            "name": name,
            "labels": {"app.kubernetes.io/component": component},
            "annotations": {"npufleet.dev/pool-name": pool},
            **more,
        }
        return {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}}

    store = FellowStore("prod", "gateway-0")
    assert store.gateways == 1
    store.replace([pod("gateway-0"), pod("gateway-1"), pod("x", pool="other"), pod("y", component="engine"), pod("z", ready=False)])
    assert store.gateways == 2
    store.apply("ADDED", pod("gateway-2"))
    assert store.gateways == 3
    store.apply("MODIFIED", pod("gateway-2", deletionTimestamp="2026-01-01T00:00:00Z"))
    store.apply("MODIFIED", pod("gateway-0", ready=False))
    assert store.gateways == 2
    store.apply("DELETED", pod("gateway-1"))
    assert store.gateways == 1
    store.apply("ADDED", {})


def test_a_replicas_slots_are_its_engines_limit_or_learned() -> None:
    def figures(running: int, waiting: int, most: int | None = None) -> EngineFigures:
        return EngineFigures.model_validate({"state": "Ready", "running": running, "waiting": waiting, "max_running": most})

    assert next_estimate(None, None, 256) == 256
    assert next_estimate(figures(3, 0, 32), None, 256) == 32
    estimate: float | None = None
    for _ in range(60):
        estimate = next_estimate(figures(12, 5), estimate, 256)
    assert estimate == 12
    assert next_estimate(figures(20, 0), estimate, 256) == 20
    assert next_estimate(figures(0, 5), estimate, 256) == 12
    assert with_slack(12) == 13
    assert with_slack(160) == 170
