"""Reports are untrusted: whatever comes in, the answer is a report within its bounds or a ReportError that names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.contract import EngineState
from npufleet_api.report import (
    MAX_MONITOR_REPORT_BYTES,
    ClassTraffic,
    DataState,
    EngineFigures,
    EngineTotals,
    GatewayReport,
    ModelTraffic,
    MonitorReport,
    Outcomes,
    ReplicaReport,
    ReportError,
    TrafficBucket,
    TrafficHistory,
    WindowAttainment,
    parse_gateway_report,
    parse_monitor_report,
)

MONITOR = MonitorReport(
    pod_name="qwen-1-0",
    pod_namespace="team-a",
    pod_uid="3f1c",
    pool="prod",
    model_namespace="team-a",
    model_name="qwen",
    workload_class="chat",
    time_unix=1_790_000_000.0,
    data=DataState.FRESH,
    engine=EngineFigures(state=EngineState.READY, running=3, waiting=1, ttft_p95_ms=412.5, kv_cache_tokens=65536, adapters=["sql"]),
    engine_age_seconds=0.4,
)
GATEWAY = GatewayReport(
    gateway="prod-gateway-0",
    pool="prod",
    time_unix=1_790_000_000.0,
    view_age_seconds=0.2,
    models=[
        ModelTraffic(
            namespace="team-a",
            name="qwen",
            served_name="qwen72b",
            workload_class="chat",
            window_seconds=300,
            outcomes=Outcomes(ok=90, client_error=2, server_error=3, no_replica=2, interrupted=1, cancelled=2),
            judged=96,
            attained=90,
            held=2,
            last_request_age_seconds=0.5,
            history=TrafficHistory(bucket_seconds=300, end_unix=1_789_999_800.0, buckets=[TrafficBucket(arrivals=3, prompt_tokens=900)]),
            windows=[WindowAttainment(window_seconds=60, judged=9, attained=8)],
            classes=[
                ClassTraffic(
                    workload_class="chat", judged=96, attained=90, windows=[WindowAttainment(window_seconds=60, judged=9, attained=8)]
                )
            ],
            engines=EngineTotals(replicas=2, reporting=1, oldest_age_seconds=1.5, running=3, kv_cache_mean_percent=12.5),
            replicas=[ReplicaReport(pod_name="qwen-1-0", pod_uid="3f1c", ready=True, draining=False, in_flight=3, report=MONITOR)],
        )
    ],
)
Parse = Callable[[bytes], MonitorReport | GatewayReport]
PARSERS: list[tuple[Parse, MonitorReport | GatewayReport]] = [(parse_monitor_report, MONITOR), (parse_gateway_report, GATEWAY)]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**15, max_value=10**40)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=40)
)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4), max_leaves=12
)


def holds(value: Any) -> None:
    """Every number of a parsed report is finite, not negative, and small enough to calculate with."""
    if isinstance(value, dict):
        for item in value.values():
            holds(item)
    elif isinstance(value, list):
        for item in value:
            holds(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        assert math.isfinite(value)
        assert 0 <= value <= 10**15


def parse_or_refuse(parse: Parse, raw: bytes) -> None:
    refusal: str | None = None
    try:
        holds(parse(raw).model_dump())
    except ReportError as error:
        refusal = str(error)
    assert refusal is None or 0 < len(refusal) < 1000


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, item in items for found in [(*prefix, key), *paths(item, (*prefix, key))]]


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    made = json.loads(json.dumps(value))
    here = made
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = new
    return made


@pytest.mark.parametrize(("parse", "report"), PARSERS, ids=["monitor", "gateway"])
def test_a_report_survives_the_wire(parse: Parse, report: MonitorReport | GatewayReport) -> None:
    assert parse(report.model_dump_json().encode()) == report


@pytest.mark.parametrize(("parse", "report"), PARSERS, ids=["monitor", "gateway"])
@given(data=st.data())
def test_a_field_replaced_by_anything_is_parsed_or_refused(
    parse: Parse, report: MonitorReport | GatewayReport, data: st.DataObject
) -> None:
    whole = json.loads(report.model_dump_json())
    path = data.draw(st.sampled_from(paths(whole)))
    parse_or_refuse(parse, json.dumps(replaced(whole, path, data.draw(json_values))).encode())


@pytest.mark.parametrize("parse", [parse for parse, _ in PARSERS], ids=["monitor", "gateway"])
@given(value=json_values)
def test_any_json_is_parsed_or_refused(parse: Parse, value: Any) -> None:
    parse_or_refuse(parse, json.dumps(value).encode())


@pytest.mark.parametrize("parse", [parse for parse, _ in PARSERS], ids=["monitor", "gateway"])
@given(raw=st.binary(max_size=256))
def test_any_bytes_are_parsed_or_refused(parse: Parse, raw: bytes) -> None:
    parse_or_refuse(parse, raw)


@pytest.mark.parametrize(("parse", "report"), PARSERS, ids=["monitor", "gateway"])
@given(cut=st.integers(min_value=0, max_value=400))
def test_a_report_cut_short_is_refused(parse: Parse, report: MonitorReport | GatewayReport, cut: int) -> None:
    raw = report.model_dump_json().encode()
    with pytest.raises(ReportError):
        parse(raw[: min(cut, len(raw) - 1)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("time_unix",), -1),
        (("time_unix",), 1e300),
        (("time_unix",), "yesterday"),
        (("engine", "running"), -1),
        (("engine", "running"), 10**18),
        (("engine", "running"), 1.5),
        (("engine", "ttft_p95_ms"), -0.001),
        (("engine", "generation_tokens_per_second"), 1e12),
        (("engine", "state"), "Asleep"),
        (("utilisation", "kv_cache_percent"), 100.5),
        (("pod_name",), ""),
        (("pod_name",), "x" * 254),
        (("data",), "Fine"),
        (("schema_version",), 0),
        (("alerts",), [{"name": "a", "severity": "fatal", "message": "", "since_unix": 0}]),
        (("alerts",), [{"name": "a", "severity": "info", "message": "", "since_unix": 0}] * 65),
    ],
)
def test_a_lie_is_refused_and_its_field_named(field: tuple[str, ...], value: Any) -> None:
    with pytest.raises(ReportError, match=rf"^{'.'.join(field)}"):
        parse_monitor_report(json.dumps(replaced(json.loads(MONITOR.model_dump_json()), field, value)).encode())


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_refused(word: str) -> None:
    raw = MONITOR.model_dump_json().replace("412.5", word).encode()
    assert word.encode() in raw
    with pytest.raises(ReportError, match=r"^(engine\.ttft_p95_ms|report)"):
        parse_monitor_report(raw)


def test_an_oversized_report_is_refused_unread() -> None:
    with pytest.raises(ReportError, match=f"at most {MAX_MONITOR_REPORT_BYTES}"):
        parse_monitor_report(b" " * (MAX_MONITOR_REPORT_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ReportError):
        parse_monitor_report(b"[" * 100_000)


def test_a_newer_sender_is_understood() -> None:
    newer = {**json.loads(MONITOR.model_dump_json()), "invented_later": {"x": [1]}}
    assert parse_monitor_report(json.dumps(newer).encode()) == MONITOR


def test_the_secret_of_a_bad_report_stays_out_of_the_message() -> None:
    with pytest.raises(ReportError) as refused:
        parse_monitor_report(json.dumps({"pod_name": {"token": "hunter2"}}).encode())
    assert "hunter2" not in str(refused.value)


def test_outcomes_add_up_and_blame_only_what_npufleet_failed() -> None:
    outcomes = GATEWAY.models[0].outcomes
    assert outcomes.total == 100
    assert outcomes.failed == 6
