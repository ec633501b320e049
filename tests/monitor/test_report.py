"""A report always fits its schema, and never turns what is unknown into zero use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.monitor_support import IDENTITY, SETTINGS
from npufleet_api.contract import AdminState, EngineState
from npufleet_api.report import DataState, parse_monitor_report
from npufleet_api.settings import MonitorSettings
from npufleet_monitor.collectors.engine import EngineSample
from npufleet_monitor.collectors.npu_exporter import NpuFigures
from npufleet_monitor.report import Readings, build_report, data_state
from npufleet_monitor.window import WindowFigures

NUMBER = st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
PERCENT = st.none() | st.floats(0, 100)


@pytest.mark.parametrize(
    ("state_ok", "metrics_ok", "answered_before", "expected"),
    [
        (True, True, False, DataState.FRESH),
        (True, True, True, DataState.FRESH),
        (True, False, True, DataState.PARTIAL),
        (False, True, True, DataState.STALE),
        (False, False, True, DataState.STALE),
        (False, True, False, DataState.NO_DATA),
        (False, False, False, DataState.NO_DATA),
    ],
)
def test_the_state_of_the_data(state_ok: bool, metrics_ok: bool, answered_before: bool, expected: DataState) -> None:
    assert data_state(state_ok=state_ok, metrics_ok=metrics_ok, answered_before=answered_before) is expected


def test_without_an_answer_there_are_no_figures() -> None:
    report = build_report(IDENTITY, MonitorSettings.model_validate(SETTINGS), Readings(), [], 5)
    assert report.data is DataState.NO_DATA
    assert report.engine is None
    assert report.utilisation.model_dump(exclude_none=True) == {}


@given(
    st.builds(
        Readings,
        state=st.none() | st.builds(AdminState, state=st.sampled_from(EngineState), running=st.integers(0, 10**6), waiting=st.just(0)),
        sample=st.none()
        | st.builds(
            EngineSample,
            prompt_tokens=NUMBER,
            generation_tokens=NUMBER,
            kv_cache_percent=PERCENT,
            stall_percent=PERCENT,
            load_seconds=NUMBER,
            max_running=NUMBER,
        ),
        window=st.builds(
            WindowFigures,
            prompt_tokens_per_second=NUMBER,
            generation_tokens_per_second=NUMBER,
            ttft_p50_ms=NUMBER,
            ttft_p95_ms=NUMBER,
            tpot_p50_ms=NUMBER,
            tpot_p95_ms=NUMBER,
        ),
        npus=st.builds(NpuFigures, compute_percent=PERCENT, memory_percent=PERCENT),
        data=st.sampled_from(DataState),
        engine_age_seconds=NUMBER,
    )
)
def test_whatever_was_read_the_gateway_can_parse_the_report(readings: Readings) -> None:
    report = build_report(IDENTITY, MonitorSettings.model_validate(SETTINGS), readings, [], 5)
    assert parse_monitor_report(report.model_dump_json().encode()) == report
    assert report.utilisation.compute_percent == readings.npus.compute_percent
