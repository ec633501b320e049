"""Reports of monitors: bounded, parsed, and believed only about their own pod."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.support import POOL, Engine, Loopback, RawEngine, eventually, loopback
from npufleet_api.report import MAX_MONITOR_REPORT_BYTES, ReplicaReport, parse_gateway_report


def report_of(pod: str, **changes: Any) -> dict[str, Any]:
    """What an honest monitor says."""
    return {
        "pod_name": pod,
        "pod_namespace": "team-a",
        "pod_uid": f"pod-{pod}",
        "pool": POOL,
        "model_namespace": "team-a",
        "model_name": "chat",
        "workload_class": "chat",
        "time_unix": 1.0,
        "data": "Fresh",
        "engine": {"state": "Ready", "running": 3},
        **changes,
    }


class MonitorServer:
    """A monitor in r0's place whose answer tests change."""

    def __init__(self) -> None:
        self.body: bytes = b""
        self.status = 200
        self.wait = False

    async def __call__(self, _: web.Request) -> web.StreamResponse:
        if self.wait:
            await asyncio.Event().wait()
        return web.Response(body=self.body, status=self.status)

    def say(self, report: dict[str, Any]) -> None:
        self.body = json.dumps(report).encode()


async def start_monitor(pool: Loopback) -> tuple[MonitorServer, Engine]:
    """r0 with its monitor."""
    monitor = MonitorServer()
    await pool.engine()
    server = Engine("127.0.0.2", monitor)
    await server.start(pool.gateway.settings.monitor_port)
    return monitor, server


def replica(pool: Loopback) -> ReplicaReport:
    """r0 in the gateway's report."""
    found: ReplicaReport = pool.traffic().replicas[0]
    return found


async def test_an_honest_report_is_passed_on_with_its_age() -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:
        monitor, server = await start_monitor(pool)
        monitor.say(report_of("r0"))
        await eventually(lambda: replica(pool).report is not None)
        found = replica(pool)
        assert found.report is not None
        assert found.report.engine is not None
        assert found.report.engine.running == 3
        assert found.report_age_seconds is not None
        assert found.report_error is None
        async with pool.session.get(f"{pool.url}/report") as response:
            parsed = parse_gateway_report(await response.read())
        assert parsed.models[0].replicas[0].report == found.report
        await server.stop()


@pytest.mark.parametrize(
    ("lie", "names"),
    [
        ({"pod_uid": "pod-r1"}, "pod_uid"),
        ({"pod_name": "r1"}, "pod_name"),
        ({"pod_namespace": "team-b"}, "pod_namespace"),
        ({"model_name": "other"}, "model_name"),
        ({"model_namespace": "team-b"}, "model_namespace"),
        ({"pool": "other"}, "pool"),
        ({"engine": {"state": "Ready", "running": -1}}, "engine.running"),
        ({"engine": {"state": "Flying"}}, "engine.state"),
        ({"utilisation": {"compute_percent": 400}}, "utilisation.compute_percent"),
        ({"alerts": [{"name": "x", "severity": "loud", "message": "", "since_unix": 0}]}, "alerts.0.severity"),
        ({"time_unix": "NaN"}, "time_unix"),
        ({"data": None}, "data"),
    ],
)
async def test_a_lying_or_malformed_report_is_no_data_and_says_why(lie: dict[str, Any], names: str) -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:
        monitor, server = await start_monitor(pool)
        monitor.say(report_of("r0"))
        await eventually(lambda: replica(pool).report is not None)
        monitor.say(report_of("r0", **lie))
        await eventually(lambda: replica(pool).report_error is not None)
        found = replica(pool)
        assert found.report is None
        assert found.report_age_seconds is None
        assert names in str(found.report_error)
        await server.stop()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (MAX_MONITOR_REPORT_BYTES + 1)])
async def test_garbage_is_no_data(body: bytes) -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:
        monitor, server = await start_monitor(pool)
        monitor.body = body
        await eventually(lambda: (replica(pool).report_error or "").startswith("bad report"))
        assert replica(pool).report is None
        await server.stop()


@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"\x00\xff\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
        b"HTTP/1.1 700 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99999,
    ],
)
async def test_what_is_no_http_is_an_error_and_the_collection_goes_on(script: bytes) -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:
        await pool.engine()
        server = RawEngine(script, keep_alive=False)
        await server.start("127.0.0.2", pool.gateway.settings.monitor_port)
        await eventually(lambda: replica(pool).report_error is not None)
        await eventually(lambda: server.connections > 2)
        assert pool.gateway.failed_tasks == []
        await server.stop()


async def test_an_endless_report_is_not_read_to_its_end() -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            sent += 65536

    async with loopback(collect_interval_seconds=0.02) as pool:
        await pool.engine()
        server = Engine("127.0.0.2", endless)
        await server.start(pool.gateway.settings.monitor_port)
        await eventually(lambda: "at most" in (replica(pool).report_error or ""))
        assert sent < 64 * MAX_MONITOR_REPORT_BYTES
        await server.stop()


async def test_a_monitor_that_goes_away_leaves_its_last_report_to_age() -> None:
    async with loopback(collect_interval_seconds=0.02, collect_timeout_seconds=0.1) as pool:
        monitor, server = await start_monitor(pool)
        monitor.say(report_of("r0"))
        await eventually(lambda: replica(pool).report is not None)
        monitor.wait = True
        await eventually(lambda: "not reached" in (replica(pool).report_error or ""))
        assert replica(pool).report is not None
        await server.stop()
        await eventually(lambda: "Connect" in (replica(pool).report_error or ""))
        first = replica(pool).report_age_seconds
        await eventually(lambda: (replica(pool).report_age_seconds or 0) > (first or 0))
        async with pool.post() as response:
            assert response.status == 200


async def test_a_slow_monitor_does_not_hold_the_others_up() -> None:
    async with loopback(collect_interval_seconds=0.02, collect_timeout_seconds=30, collect_concurrency=64) as pool:
        monitor, server = await start_monitor(pool)
        other = MonitorServer()
        await pool.engine()
        second = Engine("127.0.0.3", other)
        await second.start(pool.gateway.settings.monitor_port)
        monitor.wait = True
        other.say(report_of("r1"))
        await eventually(lambda: pool.traffic().replicas[1].report is not None)
        await server.stop()
        await second.stop()


async def test_a_missing_page_is_an_error_and_replicas_that_are_gone_are_forgotten() -> None:
    async with loopback(collect_interval_seconds=0.02) as pool:
        monitor, server = await start_monitor(pool)
        monitor.status = 404
        await eventually(lambda: "status 404" in (replica(pool).report_error or ""))
        pool.pods = []
        pool.publish()
        await eventually(lambda: pool.gateway.collector.of("pod-r0").error is None)
        await server.stop()


async def test_redirects_are_not_followed() -> None:
    reached = False

    async def elsewhere(_: web.Request) -> web.StreamResponse:
        nonlocal reached
        reached = True
        return web.Response()

    async def redirect(_: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"http://127.0.0.9:{port}/report")

    async with loopback(collect_interval_seconds=0.02) as pool:
        port = pool.gateway.settings.monitor_port
        await pool.engine()
        server, target = Engine("127.0.0.2", redirect), Engine("127.0.0.9", elsewhere)
        await server.start(port)
        await target.start(port)
        await eventually(lambda: "status 302" in (replica(pool).report_error or ""))
        assert not reached
        await server.stop()
        await target.stop()


async def test_before_the_first_view_there_is_no_report() -> None:
    async with loopback() as pool:
        pool.gateway.view.models.synced = False
        async with pool.session.get(f"{pool.url}/report") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_view"
        async with aiohttp.ClientSession() as session, session.get(f"{pool.url}/ready") as ready:
            assert ready.status == 503
