"""The benchmark's table and what it says of the aim."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from npufleet_operator.simulator.simulate import Result

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))  # benchmarks are run from the repository and not installed

from benchmarks.mixed_load import main, verdict  # noqa: E402 - after the path

RESULT = Result(
    attainment_percent=90.0, attainment_by_class={"chat": 95.0, "code": 80.0}, utilisation_percent=40.0, npu_hours=4.0, moves=2, reclaims=0,
    lost_requests=0, seconds_below_guarantee=3, longest_below_guarantee_seconds=2, requests=100, refused_requests=0, tokens_per_second=1.0,
    mean_replicas={}, start={},
)  # fmt: skip


def test_the_aim_is_judged_in_all_and_by_class() -> None:
    better = replace(RESULT, attainment_percent=100.0, attainment_by_class={"chat": 100.0, "code": 100.0})
    results = {"npufleet": RESULT, "hpa": replace(RESULT, attainment_percent=92.5), "kpa": RESULT, "static": RESULT}
    judged = verdict({**results, "oracle": better, "oracle-within-guarantees": better}, promise=1)
    assert judged == {
        "percent_of_oracle": 90.0,
        "percent_of_oracle_within_guarantees": 90.0,
        "percent_of_oracle_within_guarantees_by_class": {"chat": 95.0, "code": 80.0},
        "lead_over_best_baseline": -2.5,
        "guarantee_kept": False,
        "lost_requests": 0,
    }


def test_json_holds_every_policy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["mixed_load", "--clients", "50", "--minutes", "0.5", "--json"])
    main()
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] is True
    row = document["clients"]["50"]
    assert row["reported_for_other_hardware_percent"] == 98.2
    assert set(row["policies"]) == {"npufleet", "hpa", "kpa", "static", "oracle", "oracle-within-guarantees"}
