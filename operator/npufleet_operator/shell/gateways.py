"""Reports of a pool's gateways, with the age that says how far they can be trusted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from npufleet_api.contract import GATEWAY_PORT, REPORT_PATH
from npufleet_api.report import MAX_GATEWAY_REPORT_BYTES, DataState, GatewayReport, ReportError, parse_gateway_report
from npufleet_operator.core.observed import PodView, TrafficView
from npufleet_operator.shell.bounded import read_bounded
from npufleet_operator.shell.metrics import GATEWAY_REPORTS

TIMEOUT = aiohttp.ClientTimeout(total=5)
STALE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Kept:
    report: GatewayReport
    at: float


class GatewayPoller:
    """Polls one pool's gateways. A bad report counts as none, never as zero."""

    def __init__(self, session: aiohttp.ClientSession, pool: str, clock: Callable[[], float], interval_seconds: float = 5.0) -> None:
        self._session = session
        self._pool = pool
        self._clock = clock
        self._interval = interval_seconds
        self._polled = float("-inf")
        self._kept: dict[str, _Kept] = {}

    async def traffic(self, gateways: Sequence[PodView]) -> TrafficView:
        """What the gateways report; polled at most once per interval."""
        now = self._clock()
        present = {pod.uid: pod for pod in gateways if pod.ip and not pod.terminating and not pod.finished}
        if now - self._polled >= self._interval:
            self._polled = now
            answers = await asyncio.gather(*(self._fetch(pod) for pod in present.values()))
            for uid, report in zip(present, answers, strict=True):
                if report is not None:
                    self._kept[uid] = _Kept(report, now)
        self._kept = {uid: kept for uid, kept in self._kept.items() if uid in present}
        fresh = [kept.report for kept in self._kept.values() if now - kept.at < STALE_SECONDS]
        if not self._kept:
            return TrafficView(DataState.NO_DATA)
        if not fresh:
            return TrafficView(DataState.STALE, tuple(kept.report for kept in self._kept.values()))
        state = DataState.FRESH if len(fresh) == len(present) else DataState.PARTIAL
        return TrafficView(state, tuple(sorted(fresh, key=lambda report: report.gateway)))

    async def _fetch(self, pod: PodView) -> GatewayReport | None:
        result = "unreachable"
        try:
            async with self._session.get(
                f"http://{pod.host}:{GATEWAY_PORT}{REPORT_PATH}", timeout=TIMEOUT, allow_redirects=False
            ) as response:
                raw = await read_bounded(response, MAX_GATEWAY_REPORT_BYTES)
                result = "refused"
                if response.status != 200:
                    return None
            report = parse_gateway_report(raw)
            if report.pool != self._pool:
                return None
            result = "taken"
        except (aiohttp.ClientError, TimeoutError, OSError, ReportError):
            return None
        finally:
            GATEWAY_REPORTS.labels(self._pool, result).inc()
        return report
