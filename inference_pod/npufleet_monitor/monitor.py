"""The loops of the monitor: scrape, judge, keep the latest; and follow the settings file."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from pydantic import ValidationError

from npufleet_api.contract import ADMIN_PORT, ENGINE_PORT, METRICS_PATH, NPU_EXPORTER_URL_ENV, STATE_PATH, AdminState
from npufleet_api.pool import Device
from npufleet_api.report import Alert, DataState, MonitorReport
from npufleet_monitor.alerts import Observation, conditions, raise_alerts
from npufleet_monitor.collectors.engine import EngineSample, parse_engine
from npufleet_monitor.collectors.http import fetch, open_session
from npufleet_monitor.collectors.npu_exporter import NpuFigures, parse_npus, visible_ids
from npufleet_monitor.errors import ScrapeError
from npufleet_monitor.report import Readings, build_report, data_state, utilisation
from npufleet_monitor.settings import Identity, SettingsFile
from npufleet_monitor.window import EngineWindow

logger = logging.getLogger(__name__)

VISIBLE_DEVICES_ENV = "ASCEND_VISIBLE_DEVICES"
SETTINGS_POLL_SECONDS = 1.0
MAX_STATE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the monitor reads."""

    metrics_url: str = f"http://127.0.0.1:{ENGINE_PORT}{METRICS_PATH}"
    state_url: str = f"http://127.0.0.1:{ADMIN_PORT}{STATE_PATH}"
    npu_exporter_url: str | None = None
    npu_ids: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, environment: dict[str, str] | os._Environ[str]) -> Sources:
        """The engine beside us, and npu-exporter where NPU_EXPORTER_URL names one."""
        return cls(
            npu_exporter_url=environment.get(NPU_EXPORTER_URL_ENV) or None,
            npu_ids=visible_ids(environment.get(VISIBLE_DEVICES_ENV, "")),
        )


class Monitor:
    """The latest readings of one pod. `run` ends only by cancellation."""

    def __init__(
        self,
        identity: Identity,
        settings: SettingsFile,
        sources: Sources,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self.settings = settings
        self._sources = sources
        self._clock = clock
        self._wall_clock = wall_clock
        self._window = EngineWindow()
        self._state: AdminState | None = None
        self._sample: EngineSample | None = None
        self._state_time: float | None = None
        self._npus = NpuFigures()
        self._npu_error: str | None = None
        self._data = DataState.NO_DATA
        self._errors: dict[str, str] = {}
        self.alerts: list[Alert] = []
        self.scrapes: dict[tuple[str, str], int] = {}
        """Scrapes by source and result."""

    @property
    def readings(self) -> Readings:
        """The latest of each source."""
        return Readings(
            state=self._state,
            sample=self._sample,
            window=self._window.figures(),
            npus=self._npus,
            data=self._data,
            engine_age_seconds=None if self._state_time is None else max(0.0, self._clock() - self._state_time),
        )

    def report(self) -> MonitorReport:
        """The report of this moment."""
        return build_report(self.identity, self.settings.settings, self.readings, self.alerts, self._wall_clock())

    async def run(self) -> None:
        """Scrape and follow the settings until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_settings(), name="follow-settings")
            group.create_task(self._scrape_regularly(), name="scrape")

    async def scrape(self, session: aiohttp.ClientSession) -> None:
        """Read every source once, and judge."""
        state, sample, npus = await asyncio.gather(self._read_state(session), self._read_metrics(session), self._read_npus(session))
        now = self._clock()
        self._data = data_state(state_ok=state is not None, metrics_ok=sample is not None, answered_before=self._state is not None)
        if state is not None:
            self._state, self._state_time = state, now
        if sample is not None:
            self._sample = sample
            self._window.add(now, sample)
        self._npus = npus if npus is not None else NpuFigures()
        self._judge()

    def _judge(self) -> None:
        readings = self.readings
        seen = Observation(
            utilisation=utilisation(readings),
            timeout_percent=readings.window.timeout_percent,
            unhealthy_npus=readings.npus.unhealthy,
            data=readings.data,
            engine_age_seconds=readings.engine_age_seconds,
            npu_error=self._npu_error,
        )
        before = {alert.name: alert.since_unix for alert in self.alerts}
        self.alerts = raise_alerts(conditions(seen, self.settings.settings.alerts), before, self._wall_clock())
        for alert in self.alerts:
            if alert.name not in before:
                logger.warning("alert %s (%s): %s", alert.name, alert.severity, alert.message)
        for name in before.keys() - {alert.name for alert in self.alerts}:
            logger.info("alert %s is over", name)

    async def _scrape_regularly(self) -> None:
        async with open_session() as session:
            while True:
                started = self._clock()
                await self.scrape(session)
                interval = self.settings.settings.scrape_interval_seconds
                await asyncio.sleep(max(0.05, interval - (self._clock() - started)))

    async def _follow_settings(self) -> None:
        while True:
            await asyncio.sleep(SETTINGS_POLL_SECONDS)
            await asyncio.to_thread(self.settings.refresh)

    async def _read_state(self, session: aiohttp.ClientSession) -> AdminState | None:
        try:
            raw = await fetch(session, self._sources.state_url, MAX_STATE_BYTES)
            try:
                state = AdminState.model_validate_json(raw)
            except ValidationError as error:
                raise ScrapeError(f"{self._sources.state_url}: {error.errors(include_url=False, include_input=False)[0]['msg']}") from error
        except ScrapeError as error:
            self._failed("state", error)
            return None
        self._succeeded("state")
        return state

    async def _read_metrics(self, session: aiohttp.ClientSession) -> EngineSample | None:
        try:
            sample = parse_engine(await fetch(session, self._sources.metrics_url))
        except ScrapeError as error:
            self._failed("metrics", error)
            return None
        self._succeeded("metrics")
        return sample

    async def _read_npus(self, session: aiohttp.ClientSession) -> NpuFigures | None:
        url = self._sources.npu_exporter_url
        self._npu_error = None
        if url is None or self.settings.settings.device is not Device.NPU:
            return None
        try:
            raw = await fetch(session, url)
            figures = parse_npus(raw, namespace=self.identity.pod_namespace, pod_name=self.identity.pod_name, ids=self._sources.npu_ids)
        except ScrapeError as error:
            self._npu_error = str(error)
            self._failed("npus", error)
            return None
        self._succeeded("npus")
        return figures

    def _failed(self, source: str, error: ScrapeError) -> None:
        self._count(source, "error")
        if source not in self._errors:
            logger.warning("%s: %s", source, error)
        self._errors[source] = str(error)

    def _succeeded(self, source: str) -> None:
        self._count(source, "ok")
        if self._errors.pop(source, None) is not None:
            logger.info("%s: reached again", source)

    def _count(self, source: str, result: str) -> None:
        self.scrapes[source, result] = self.scrapes.get((source, result), 0) + 1
