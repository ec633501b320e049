"""When alerts are raised, and since when."""

from __future__ import annotations

from typing import Any

import pytest

from npufleet_api.pool import AlertThresholds
from npufleet_api.report import DataState, Utilisation
from npufleet_monitor.alerts import Observation, conditions, raise_alerts

THRESHOLDS = AlertThresholds()


def names(seen: Observation, thresholds: AlertThresholds = THRESHOLDS) -> list[str]:
    return [condition.name for condition in conditions(seen, thresholds)]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({}, []),
        ({"utilisation": Utilisation(memory_percent=84.9)}, []),
        ({"utilisation": Utilisation(memory_percent=85)}, ["MemoryHigh"]),
        ({"utilisation": Utilisation(compute_percent=90)}, ["ComputeHigh"]),
        ({"utilisation": Utilisation(pipeline_stall_percent=15)}, ["PipelineStall"]),
        ({"utilisation": Utilisation(kv_cache_percent=100)}, []),
        ({"timeout_percent": 4.9}, []),
        ({"timeout_percent": 5}, ["TimeoutsHigh"]),
        ({"unhealthy_npus": ("3",)}, ["NpuUnhealthy"]),
        ({"data": DataState.STALE, "engine_age_seconds": 9.9}, []),
        ({"data": DataState.STALE, "engine_age_seconds": 10}, ["EngineUnreachable"]),
        ({"data": DataState.NO_DATA, "engine_age_seconds": None}, []),
        ({"data": DataState.FRESH, "engine_age_seconds": 10}, []),
        ({"npu_error": "no answer"}, ["NpuMetricsMissing"]),
        (
            {"utilisation": Utilisation(memory_percent=99, compute_percent=99), "unhealthy_npus": ("1", "2")},
            ["NpuUnhealthy", "MemoryHigh", "ComputeHigh"],
        ),
    ],
)
def test_alerts_by_observation(seen: dict[str, Any], expected: list[str]) -> None:
    assert names(Observation(**seen)) == expected


def test_thresholds_are_the_pools() -> None:
    seen = Observation(utilisation=Utilisation(memory_percent=50))
    assert names(seen, AlertThresholds(memory_percent=50)) == ["MemoryHigh"]


def test_a_message_says_the_value_and_the_threshold() -> None:
    (found,) = conditions(Observation(utilisation=Utilisation(memory_percent=91.26)), THRESHOLDS)
    assert "91.3 %" in found.message
    assert "85 %" in found.message


def test_an_alert_keeps_its_time_while_it_holds_and_takes_a_new_one_afterwards() -> None:
    held = conditions(Observation(timeout_percent=50), THRESHOLDS)
    (first,) = raise_alerts(held, {}, 100)
    assert first.since_unix == 100
    (second,) = raise_alerts(held, {first.name: first.since_unix}, 200)
    assert second.since_unix == 100
    assert raise_alerts([], {second.name: second.since_unix}, 300) == []
    (third,) = raise_alerts(held, {}, 400)
    assert third.since_unix == 400


def test_a_message_about_many_npus_fits_the_report() -> None:
    held = conditions(Observation(unhealthy_npus=tuple(str(number) for number in range(1000))), THRESHOLDS)
    (alert,) = raise_alerts(held, {}, 1)
    assert len(alert.message) <= 512
