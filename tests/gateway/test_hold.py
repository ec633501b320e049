"""Requests for a model without a replica: held, counted, kept alive, served when one is ready."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from gateway.support import DONE, ROLE, chunk, eventually, loopback
from npufleet_gateway.hold import HEARTBEAT

ANSWER = ROLE + chunk("hel") + chunk("lo") + DONE


async def test_a_held_request_is_demand_and_is_served_by_the_first_replica() -> None:
    async with loopback(hold_seconds=30.0) as pool:
        request = asyncio.ensure_future(pool.post().__aenter__())
        await eventually(lambda: pool.traffic().held == 1)
        await pool.engine(ready=False)
        assert not request.done()
        pool.pods.clear()
        await pool.engine()
        response = await request
        assert response.status == 200
        assert (await response.json())["choices"][0]["message"]["content"] == "hello"
        await pool.settled()
        assert pool.traffic().held == 0
        assert pool.traffic().outcomes.ok == 1


async def test_a_held_stream_hears_heartbeats_and_then_its_answer() -> None:
    async with loopback(hold_seconds=30.0, heartbeat_seconds=0.02) as pool, pool.stream() as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert (await response.content.readany()).startswith(HEARTBEAT)
        await pool.engine()
        rest = await response.read()
        assert rest.replace(HEARTBEAT, b"") == ANSWER


async def test_a_hold_ends_at_its_deadline() -> None:
    async with loopback(hold_seconds=0.1, heartbeat_seconds=5.0) as pool:
        async with pool.post() as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_ready_replica"
            assert int(response.headers["retry-after"]) > 0
        await pool.settled()
        assert pool.traffic().outcomes.no_replica == pool.traffic().judged == 1


async def test_a_stream_whose_hold_ends_after_a_heartbeat_is_told_in_the_stream() -> None:
    async with loopback(hold_seconds=0.1, heartbeat_seconds=0.02) as pool:
        async with pool.stream() as response:
            assert response.status == 200
            body = await response.read()
        event = json.loads(body.replace(HEARTBEAT, b"").removeprefix(b"data: "))
        assert event["error"]["code"] == "no_ready_replica"
        await pool.settled()
        assert pool.traffic().outcomes.no_replica == 1


async def test_an_error_of_the_replica_after_a_heartbeat_is_an_event() -> None:
    async def refuses(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async with loopback(hold_seconds=30.0, heartbeat_seconds=0.02) as pool, pool.stream() as response:
        await response.content.readany()
        await pool.engine(refuses)
        rest = (await response.read()).replace(HEARTBEAT, b"")
        assert json.loads(rest.removeprefix(b"data: "))["error"]["message"] == "too long"
        await pool.settled()
        assert pool.traffic().outcomes.client_error == 1


async def test_a_replica_that_dies_before_its_first_byte_is_replaced_though_the_stream_was_begun() -> None:
    async with loopback(hold_seconds=30.0, heartbeat_seconds=0.02) as pool, pool.stream() as response:
        await response.content.readany()
        await pool.raw_engine(b"")
        await pool.engine()
        assert (await response.read()).replace(HEARTBEAT, b"").endswith(DONE)


async def test_a_client_that_leaves_is_held_no_longer_and_too_many_are_refused() -> None:
    async with loopback(hold_seconds=30.0, max_held=2) as pool:
        requests = [asyncio.ensure_future(pool.post().__aenter__()) for _ in range(2)]
        await eventually(lambda: pool.traffic().held == 2)
        async with pool.post() as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "capacity_exceeded"
        for request in requests:
            request.cancel()
        await pool.settled()
        assert pool.traffic().held == 0


async def test_a_model_that_is_deleted_is_held_no_longer() -> None:
    async with loopback(hold_seconds=30.0) as pool:
        request = asyncio.ensure_future(pool.post().__aenter__())
        await eventually(lambda: pool.traffic().held == 1)
        pool.models = []
        pool.publish()
        response = await request
        assert response.status == 503
        assert "it was deleted" in await response.text()
