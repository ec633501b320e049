"""The monitor beside an engine that comes, goes and lies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from monitor.monitor_support import Clock, EngineMetrics, Pages, build_monitor, eventually, write_settings
from npufleet_api.report import DataState
from npufleet_monitor.collectors.http import fetch, open_session
from npufleet_monitor.errors import ScrapeError
from npufleet_monitor.metrics import render

READY = b'{"state": "Ready", "running": 2, "waiting": 1}'
OWN = b'{id="0",namespace="team-a",pod_name="r0"}'
NPU = b"npu_chip_info_utilization" + OWN + b" 95\nnpu_chip_info_health_status" + OWN + b" 0\n"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as opened:
        yield opened


@pytest.fixture
async def engine() -> AsyncIterator[Pages]:
    pages = Pages({"/state": lambda: READY})
    await pages.start()
    yield pages
    await pages.stop()


async def test_figures_of_a_serving_engine(tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages) -> None:
    metrics = EngineMetrics()
    metrics.kv.set(0.5)
    engine.pages["/metrics"] = metrics.page
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    metrics.generation.inc(100)
    metrics.ttft.observe(0.3)
    clock.now += 2
    await monitor.scrape(session)
    report = monitor.report()
    assert report.data is DataState.FRESH
    assert report.engine is not None
    assert (report.engine.running, report.engine.waiting) == (2, 1)
    assert report.engine.generation_tokens_per_second == pytest.approx(50)
    assert report.engine.ttft_p50_ms == pytest.approx(300)
    assert report.utilisation.kv_cache_percent == 50
    assert report.utilisation.compute_percent is None
    assert report.alerts == []


async def test_an_engine_that_never_answered_is_no_data(
    tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages
) -> None:
    monitor = build_monitor(tmp_path, engine, clock)
    await engine.stop()
    await monitor.scrape(session)
    report = monitor.report()
    assert (report.data, report.engine, report.engine_age_seconds) == (DataState.NO_DATA, None, None)


async def test_an_engine_that_stops_answering_goes_stale_keeps_its_figures_and_raises_an_alert(
    tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages
) -> None:
    engine.pages["/metrics"] = EngineMetrics().page
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    await engine.stop()
    clock.now += 5
    await monitor.scrape(session)
    report = monitor.report()
    assert report.data is DataState.STALE
    assert report.engine is not None
    assert report.engine.running == 2
    assert report.engine_age_seconds == 5
    assert report.alerts == []
    clock.now += 6
    await monitor.scrape(session)
    (alert,) = monitor.report().alerts
    assert (alert.name, alert.since_unix) == ("EngineUnreachable", 1011)
    await engine.start()
    clock.now += 1
    await monitor.scrape(session)
    assert monitor.report().data is DataState.FRESH
    assert monitor.report().alerts == []


async def test_an_engine_without_metrics_is_partial(tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages) -> None:
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    report = monitor.report()
    assert report.data is DataState.PARTIAL
    assert report.engine is not None
    assert report.engine.running == 2


@pytest.mark.parametrize("lie", [b"", b"{", b'{"state": "Flying"}', b'{"state": "Ready", "running": -1}', b"\xff", b" " * 100_000])
async def test_a_bad_state_is_no_data(lie: bytes, tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages) -> None:
    engine.pages.update({"/metrics": EngineMetrics().page, "/state": lambda: lie})
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    assert monitor.report().data is DataState.NO_DATA


async def test_npus_are_read_where_there_is_an_exporter(
    tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages
) -> None:
    engine.pages.update({"/metrics": EngineMetrics().page, "/npu": lambda: NPU})
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    report = monitor.report()
    assert report.utilisation.compute_percent == 95
    assert [alert.name for alert in report.alerts] == ["NpuUnhealthy", "ComputeHigh"]
    engine.pages["/npu"] = None
    await monitor.scrape(session)
    report = monitor.report()
    assert report.utilisation.compute_percent is None
    assert [alert.name for alert in report.alerts] == ["NpuMetricsMissing"]
    assert report.data is DataState.FRESH


async def test_on_cpu_no_exporter_is_asked(tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages) -> None:
    engine.pages.update({"/metrics": EngineMetrics().page, "/npu": lambda: NPU})
    monitor = build_monitor(tmp_path, engine, clock, device="CPU")
    await monitor.scrape(session)
    assert monitor.report().utilisation.compute_percent is None


async def test_the_metrics_page_tells_settings_scrapes_data_and_alerts(
    tmp_path: Path, clock: Clock, session: aiohttp.ClientSession, engine: Pages
) -> None:
    engine.pages.update({"/metrics": EngineMetrics().page, "/npu": lambda: NPU})
    monitor = build_monitor(tmp_path, engine, clock)
    await monitor.scrape(session)
    (tmp_path / "monitor.yaml").write_text("nonsense: [", encoding="utf-8")
    monitor.settings.refresh()
    text = render(monitor).decode()
    assert "npufleet_monitor_settings_valid 0.0" in text
    assert 'npufleet_monitor_scrapes_total{result="ok",source="state"} 1.0' in text
    assert 'npufleet_monitor_data{state="Fresh"} 1.0' in text
    assert 'alert="NpuUnhealthy"' in text
    assert 'npufleet_monitor_compute_percent{model="chat",namespace="team-a",workload_class="chat"} 95.0' in text


async def test_the_loops_follow_engine_and_settings(tmp_path: Path, engine: Pages) -> None:
    engine.pages["/metrics"] = EngineMetrics().page
    monitor = build_monitor(tmp_path, engine, asyncio.get_running_loop().time)
    running = asyncio.create_task(monitor.run())
    await eventually(lambda: monitor.report().data is DataState.FRESH)
    write_settings(tmp_path, workloadClass="code")
    await eventually(lambda: monitor.report().workload_class == "code")
    running.cancel()
    await asyncio.wait([running])


async def test_a_page_is_read_within_its_bound(session: aiohttp.ClientSession, engine: Pages) -> None:
    engine.pages["/large"] = lambda: b"x" * 1001
    assert len(await fetch(session, engine.url("/large"), 1001)) == 1001
    with pytest.raises(ScrapeError, match="more than 1000 bytes"):
        await fetch(session, engine.url("/large"), 1000)
    with pytest.raises(ScrapeError, match="status 500"):
        await fetch(session, engine.url("/absent"))
    with pytest.raises(ScrapeError, match="InvalidUrl"):
        await fetch(session, "nonsense")
