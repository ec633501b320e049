"""What clients got, from the gateways' reports, in the rounded figures that status shows."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from npufleet_api.model import AscendModelSpec, MeasuredSlo
from npufleet_api.report import DataState, ModelTraffic
from npufleet_operator.core.observed import ModelKey, TrafficView

SIGNIFICANT_DIGITS = 2


def round_figure(value: float) -> int:
    """Two significant digits: status shall not change with every request."""
    if value <= 0:
        return 0
    step = 10 ** max(0, floor(log10(value)) - SIGNIFICANT_DIGITS + 1)
    return int(round(value / step) * step)


def traffic_of(view: TrafficView, key: ModelKey) -> list[ModelTraffic]:
    """The model's traffic, one entry per gateway."""
    return [t for report in view.reports for t in report.models if (t.namespace, t.name) == key]


def in_flight_by_pod(view: TrafficView) -> dict[str, int]:
    """Requests in flight, by pod UID, over all gateways."""
    load: dict[str, int] = {}
    for report in view.reports:
        for traffic in report.models:
            for replica in traffic.replicas:
                load[replica.pod_uid] = load.get(replica.pod_uid, 0) + replica.in_flight
    return load


def measured_slo(view: TrafficView, key: ModelKey, spec: AscendModelSpec) -> MeasuredSlo:
    """Counts are added up over gateways; of percentiles the worst gateway's is shown, since they do not add up."""
    parts = traffic_of(view, key)
    state = view.data if parts else DataState.NO_DATA
    judged = sum(part.judged for part in parts)
    requests = sum(part.outcomes.total for part in parts)
    if parts and requests == 0 and state is DataState.FRESH:
        state = DataState.ZERO
    slo = spec.slo
    return MeasuredSlo(
        data=state.value,
        window_seconds=int(max((part.window_seconds for part in parts), default=0)),
        requests=round_figure(requests),
        errors=round_figure(sum(part.outcomes.failed for part in parts)),
        attainment_percent=100 * sum(part.attained for part in parts) // judged if judged and slo else None,
        ttft_p95_milliseconds=_worst([part.ttft_p95_ms for part in parts]),
        ttft_target_milliseconds=slo.ttft_milliseconds if slo else None,
        tpot_p95_milliseconds=_worst([part.tpot_p95_ms for part in parts]),
        tpot_target_milliseconds=slo.tpot_milliseconds if slo else None,
    )


def _worst(figures: Sequence[float | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return round_figure(max(known)) if known else None
