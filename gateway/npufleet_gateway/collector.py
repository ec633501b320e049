"""Collects the monitors' reports. They are untrusted: read within bounds, parsed, and believed only about the pod they came from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import aiohttp
from yarl import URL

from npufleet_api.contract import REPORT_PATH
from npufleet_api.report import MAX_MONITOR_REPORT_BYTES, MonitorReport, ReportError, parse_monitor_report
from npufleet_gateway.metrics import Metrics
from npufleet_gateway.prediction import ReplicaFigures
from npufleet_gateway.routing import Replica, ReplicaState
from npufleet_gateway.settings import GatewaySettings
from npufleet_gateway.view import ClusterView

logger = logging.getLogger(__name__)

KEEP_SECONDS = 60.0
"""A monitor that cannot be reached keeps its last report, with its age, for so long."""


SLOWEST_PREFILL = 0.1
"""Tokens per second; a report that says less is taken at this."""

Learn = Callable[[str, ReplicaFigures], None]
"""Takes the figures of the replica with a pod UID."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What is known of a replica from its monitor. `received` is the collector's clock at the last good report."""

    report: MonitorReport | None = None
    received: float | None = None
    error: str | None = None


def check_identity(report: MonitorReport, replica: Replica, pool: str) -> None:
    """Raise ReportError unless the report speaks of the pod that it was fetched from."""
    said = (report.pod_uid, report.pod_namespace, report.pod_name, report.model_namespace, report.model_name, report.pool)
    known = (replica.pod_uid, replica.namespace, replica.pod_name, replica.namespace, replica.model_name, pool)
    names = ("pod_uid", "pod_namespace", "pod_name", "model_namespace", "model_name", "pool")
    for name, claim, truth in zip(names, said, known, strict=True):
        if claim != truth:
            raise ReportError(f"{name} is {claim!r}, but the report was fetched from a pod whose {name} is {truth!r}")


def figures_of(report: MonitorReport, now: float) -> ReplicaFigures | None:
    """What routing needs of a report that arrived at `now`; None if it has no figures. Their age at the monitor counts."""
    engine = report.engine
    if engine is None:
        return None
    return ReplicaFigures(
        time=now - (report.engine_age_seconds or 0.0),
        running=engine.running,
        waiting=engine.waiting,
        kv_cache_percent=report.utilisation.kv_cache_percent,
        kv_cache_tokens=engine.kv_cache_tokens,
        prefill_seconds_per_token=1 / max(SLOWEST_PREFILL, engine.prefill_tokens_per_second) if engine.prefill_tokens_per_second else None,
        adapters=frozenset(engine.adapters),
        tpot_seconds=None if engine.tpot_p50_ms is None else engine.tpot_p50_ms / 1000,
    )


class Collector:
    """The latest report of each replica, by pod UID."""

    def __init__(self, view: ClusterView, metrics: Metrics, settings: GatewaySettings, clock: Callable[[], float], learn: Learn) -> None:
        self._view = view
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._learn = learn
        self._collected: dict[str, Collected] = {}
        self._slots = asyncio.Semaphore(settings.collect_concurrency)

    def of(self, pod_uid: str) -> Collected:
        """What is known of a replica."""
        return self._collected.get(pod_uid, Collected())

    def age_seconds(self, collected: Collected) -> float | None:
        """Age of the report itself: since its reception."""
        return None if collected.received is None else max(0.0, self._clock() - collected.received)

    async def run(self) -> None:
        """Collect until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.collect_timeout_seconds)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15, use_dns_cache=False)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
        ) as session:
            while True:
                await self.collect(session)
                await asyncio.sleep(self._settings.collect_interval_seconds)

    async def collect(self, session: aiohttp.ClientSession) -> None:
        """One round over all replicas."""
        replicas = [replica for route in self._view.table.routes for replica in route.replicas if _reports(replica)]
        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                group.create_task(self._collect_one(session, replica))
        self._retain({replica.pod_uid for route in self._view.table.routes for replica in route.replicas})

    async def _collect_one(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        async with self._slots:
            previous = self.of(replica.pod_uid)
            try:
                raw = await _fetch(session, replica, self._settings.monitor_port)
            except (aiohttp.ClientError, OSError) as error:
                text = f"monitor not reached: {type(error).__name__} {error}"[:512].strip()
                fresh = previous.received is not None and self._clock() - previous.received < KEEP_SECONDS
                found = Collected(previous.report, previous.received, text) if fresh else Collected(error=text)
                result = "unreachable"
            else:
                found, result = self._judge(raw, replica)
            if found.error is not None and found.error != previous.error:
                logger.warning("report of %s/%s: %s", replica.namespace, replica.pod_name, found.error)
            self._collected[replica.pod_uid] = found
            figures = figures_of(found.report, self._clock()) if result == "ok" and found.report is not None else None
            if figures is not None:
                self._learn(replica.pod_uid, figures)
            self._metrics.reports.labels(result).inc()

    def _judge(self, raw: bytes, replica: Replica) -> tuple[Collected, str]:
        try:
            report = parse_monitor_report(raw)
            check_identity(report, replica, self._view.pool)
        except ReportError as error:
            return Collected(error=f"bad report: {error}"[:512]), "bad"
        return Collected(report, self._clock()), "ok"

    def _retain(self, pod_uids: Collection[str]) -> None:
        self._collected = {uid: collected for uid, collected in self._collected.items() if uid in pod_uids}


def _reports(replica: Replica) -> bool:
    return bool(replica.ip) and replica.state is not ReplicaState.ENDED


async def _fetch(session: aiohttp.ClientSession, replica: Replica, port: int) -> bytes:
    url = URL(f"http://{replica.host}:{port}{REPORT_PATH}", encoded=True)
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise aiohttp.ClientError(f"status {response.status}")
        parts: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_MONITOR_REPORT_BYTES:
                break
        return b"".join(parts)
