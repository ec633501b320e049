"""What clients got and what replicas say of themselves, from the gateways' reports: indexed, and no more believed than it deserves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from math import floor, log10
from typing import Any

from npufleet_api.model import AscendModelSpec, MeasuredSlo
from npufleet_api.report import DataState, GatewayReport, ModelTraffic
from npufleet_operator.core.observed import ModelKey, TrafficView

SIGNIFICANT_DIGITS = 2
MAX_SKEW_SECONDS = 300.0
"""Reports that say they are of another time than this far from now are not believed: a clock jumped, or they were kept by somebody."""


def round_figure(value: float) -> int:
    """Two significant digits: status shall not change with every request."""
    if value <= 0:
        return 0
    step = 10 ** max(0, floor(log10(value)) - SIGNIFICANT_DIGITS + 1)
    return int(round(value / step) * step)


class Measured:
    """The reports of one observation that can be believed, by model and by replica."""

    def __init__(self, view: TrafficView, now: datetime) -> None:
        moment = now.timestamp()
        self.reports = tuple(r for r in view.reports if abs(moment - r.time_unix) <= MAX_SKEW_SECONDS)
        self.data = view.data
        if len(self.reports) < len(view.reports) and view.data in (DataState.FRESH, DataState.PARTIAL):
            self.data = DataState.PARTIAL if self.reports else DataState.STALE
        self._by_model: dict[ModelKey, list[tuple[GatewayReport, ModelTraffic]]] = {}
        self.in_flight: dict[str, int] = {}
        """Requests in flight, by pod UID, over all gateways."""
        for report in self.reports:
            for traffic in report.models:
                self._by_model.setdefault((traffic.namespace, traffic.name), []).append((report, traffic))
                for replica in traffic.replicas:
                    self.in_flight[replica.pod_uid] = self.in_flight.get(replica.pod_uid, 0) + replica.in_flight

    def of(self, key: ModelKey) -> list[tuple[GatewayReport, ModelTraffic]]:
        """The model's traffic, one entry per gateway that reports it."""
        return self._by_model.get(key, [])


def measured_slo(measured: Measured, key: ModelKey, spec: AscendModelSpec) -> MeasuredSlo:
    """Counts are added up over gateways; of percentiles the worst gateway's is shown, since they do not add up."""
    parts = [traffic for _, traffic in measured.of(key)]
    state = measured.data if parts else DataState.NO_DATA
    judged = sum(part.judged for part in parts)
    requests = sum(part.outcomes.total for part in parts)
    if parts and requests == 0 and state is DataState.FRESH:
        state = DataState.ZERO
    slo = spec.slo
    return _slo(
        data=state.value,
        window_seconds=int(max((part.window_seconds for part in parts), default=0)),
        requests=round_figure(requests),
        errors=round_figure(sum(part.outcomes.failed for part in parts)),
        attainment_percent=min(100, 100 * sum(part.attained for part in parts) // judged) if judged and slo else None,
        ttft_p95_milliseconds=_worst([part.ttft_p95_ms for part in parts]),
        ttft_target_milliseconds=slo.ttft_milliseconds if slo else None,
        tpot_p95_milliseconds=_worst([part.tpot_p95_ms for part in parts]),
        tpot_target_milliseconds=slo.tpot_milliseconds if slo else None,
    )


@lru_cache(maxsize=4096)
def _slo(**figures: Any) -> MeasuredSlo:
    """Rounded figures repeat."""
    return MeasuredSlo.model_validate(figures)


def _worst(figures: Sequence[float | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return round_figure(max(known)) if known else None
