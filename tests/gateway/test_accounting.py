"""The windows of all models."""

from __future__ import annotations

from npufleet_api.slo import Exchange, Outcome, SloTargets
from npufleet_gateway.accounting import Accounting

TARGETS = SloTargets(ttft_ms=100)
KEY = ("team-a", "chat")


def ok(ttft_ms: float = 50) -> Exchange:
    return Exchange(Outcome.OK, True, 1000, ttft_ms, 10)


def test_a_quiet_model_has_no_percentiles_and_zero_counts() -> None:
    accounting = Accounting(lambda: 0.0)
    summary = accounting.summary(KEY)
    assert summary.outcomes.total == summary.judged == summary.in_flight == 0
    assert summary.ttft_p95_ms is None


def test_in_flight_requests_survive_the_models_removal_until_they_end() -> None:
    accounting = Accounting(lambda: 0.0)
    accounting.started(KEY)
    accounting.retain(set())
    assert accounting.summary(KEY).in_flight == 1
    accounting.finished(KEY, ok(), TARGETS)
    assert accounting.summary(KEY).outcomes.ok == 1
    accounting.retain(set())
    assert accounting.summary(KEY).outcomes.ok == 0
