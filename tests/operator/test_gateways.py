"""Gateways' reports: bounded, checked, and never older than they say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from npufleet_api.report import DataState, GatewayReport, ModelTraffic, Outcomes
from npufleet_operator.core.measured import Measured, measured_slo, round_figure
from npufleet_operator.core.observed import PodView, TrafficView
from npufleet_operator.shell import gateways
from npufleet_operator.shell.gateways import STALE_SECONDS, GatewayPoller
from support.fleet import START, model_spec

GATEWAY = PodView("sys", "g", "g1", START, {}, "", "", "n", "Running", {}, ip="127.0.0.1")
REPORT = GatewayReport(gateway="g", pool="prod", time_unix=1, view_age_seconds=0)
NOW = datetime.fromtimestamp(1, UTC)


class Gateway:
    """A gateway's /report."""

    def __init__(self) -> None:
        self.body: bytes = REPORT.model_dump_json().encode()
        self.status = 200
        self.asked = 0

    async def report(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.body, status=self.status)


@pytest.fixture
async def polled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Gateway, GatewayPoller, list[float]]]:
    gateway, clock = Gateway(), [0.0]
    app = web.Application()
    app.router.add_get("/report", gateway.report)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(gateways, "GATEWAY_PORT", runner.addresses[0][1])
    async with aiohttp.ClientSession() as session:
        yield gateway, GatewayPoller(session, "prod", lambda: clock[0], interval_seconds=5), clock
    await runner.cleanup()


async def test_fresh_partial_stale_and_no_data_are_told_apart(polled: tuple[Gateway, GatewayPoller, list[float]]) -> None:
    gateway, poller, clock = polled
    assert (await poller.traffic([])).data is DataState.NO_DATA
    clock[0] = 10
    assert (await poller.traffic([GATEWAY])).data is DataState.FRESH
    other = replace(GATEWAY, uid="g2", ip="127.0.0.2")
    clock[0] = 20
    gateway.status = 500
    assert (await poller.traffic([GATEWAY, other])).data is DataState.PARTIAL
    clock[0] = 20 + STALE_SECONDS
    assert (await poller.traffic([GATEWAY])).data is DataState.STALE
    clock[0] += 10
    assert (await poller.traffic([replace(GATEWAY, terminating=True)])).data is DataState.NO_DATA


async def test_a_gateway_is_asked_once_per_interval(polled: tuple[Gateway, GatewayPoller, list[float]]) -> None:
    gateway, poller, clock = polled
    for seconds in (0, 1, 4.9, 5, 6):
        clock[0] = seconds
        await poller.traffic([GATEWAY])
    assert gateway.asked == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        REPORT.model_copy(update={"pool": "other"}).model_dump_json().encode(),
        REPORT.model_dump_json().replace('"view_age_seconds":0.0', '"view_age_seconds":NaN').encode(),
        REPORT.model_dump_json().replace('"view_age_seconds":0.0', '"view_age_seconds":-1').encode(),
        b'{"x": "' + b"y" * (10 * 1024 * 1024) + b'"}',
        b'{"x": "' + b"y" * (17 * 1024 * 1024) + b'"}',
    ],
    ids=["empty", "broken", "null", "another pool's", "nan", "negative", "10 MB", "too long"],
)
async def test_a_bad_report_is_no_data_and_counted(polled: tuple[Gateway, GatewayPoller, list[float]], body: bytes) -> None:
    gateway, poller, clock = polled
    before = _refused()
    gateway.body = body
    assert (await poller.traffic([GATEWAY])).data is DataState.NO_DATA
    assert _refused() == before + 1
    gateway.body, clock[0] = REPORT.model_dump_json().encode(), 10
    assert (await poller.traffic([GATEWAY])).data is DataState.FRESH
    assert _refused() == before + 1


def _refused() -> float:
    return REGISTRY.get_sample_value("npufleet_operator_gateway_reports_total", {"pool": "prod", "result": "refused"}) or 0.0


def traffic(**changes: object) -> ModelTraffic:
    base = {"namespace": "team", "name": "tiny", "served_name": "tiny", "workload_class": "chat", "window_seconds": 300}
    return ModelTraffic.model_validate({**base, **changes})


def test_counts_add_up_and_the_worst_percentile_is_shown() -> None:
    spec = model_spec(slo={"ttftMilliseconds": 500})
    one = traffic(outcomes=Outcomes(ok=90, server_error=10), judged=100, attained=90, ttft_p95_ms=123.4)
    two = traffic(outcomes=Outcomes(ok=100), judged=100, attained=100, ttft_p95_ms=456.7)
    view = TrafficView(DataState.FRESH, tuple(REPORT.model_copy(update={"models": [t]}) for t in (one, two)))
    slo = measured_slo(Measured(view, NOW), ("team", "tiny"), spec)
    assert (slo.data, slo.requests, slo.errors, slo.attainment_percent) == ("Fresh", 200, 10, 95)
    assert (slo.ttft_p95_milliseconds, slo.ttft_target_milliseconds) == (460, 500)


def test_no_request_is_a_measurement_and_no_gateway_is_none() -> None:
    quiet = TrafficView(DataState.FRESH, (REPORT.model_copy(update={"models": [traffic()]}),))
    assert measured_slo(Measured(quiet, NOW), ("team", "tiny"), model_spec()).data == "Zero"
    assert measured_slo(Measured(TrafficView(), NOW), ("team", "tiny"), model_spec()).data == "NoData"


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (7, 7), (12.4, 12), (123, 120), (1999, 2000), (0.4, 0)])
def test_figures_have_two_significant_digits(value: float, rounded: int) -> None:
    assert round_figure(value) == rounded
