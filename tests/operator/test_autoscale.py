"""Elastic scaling, one decision each: what moves, what holds, and the reason that is given."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from npufleet_api.conditions import Reason
from npufleet_api.report import DataState, TrafficBucket, TrafficHistory, Utilisation, WindowAttainment
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import TrafficView
from support.fleet import DRAIN_SECONDS, Fleet, is_quiet, model_spec, node, pool_spec
from support.load import Load, elastic_spec, loaded, put_load, run

COOLDOWN = 120
NOTHING_MEASURED = {"ttft_p50_ms": None, "ttft_p95_ms": None, "tpot_p50_ms": None, "tpot_p95_ms": None}
CHAT_ONLY = pool_spec(classes=[{"name": "chat"}])


def replicas(fleet: Fleet, name: str = "tiny") -> int:
    """Replicas that take work or will."""
    return fleet.models[("team", name)].status.desired_replicas


def reason(fleet: Fleet, name: str = "tiny") -> str:
    """What elastic scaling says in the model's status."""
    scaling = fleet.models[("team", name)].status.scaling
    assert scaling is not None
    return scaling.reason


def reasons(plans: list[Plan]) -> list[str]:
    """Reasons of all decisions, in order."""
    return [choice.reason for plan in plans for choice in plan.choices]


def test_replicas_are_added_when_all_would_miss_a_target() -> None:
    fleet = loaded(35, 400)
    assert replicas(fleet) == 4
    assert len(fleet.of("tiny")) == 4
    assert fleet.condition("tiny", "Ready")[0] == "True"


def test_a_constant_load_reaches_a_fixed_point_and_stays() -> None:
    fleet = loaded(35, 400)
    plans = run(fleet, {"tiny": Load(35)}, 3600)
    assert all(is_quiet(plan) for plan in plans)
    assert not [choice for plan in plans for choice in plan.choices]


def test_a_known_capacity_is_used_to_add_several_at_once() -> None:
    fleet = loaded(35, 400)
    assert fleet.models[("team", "tiny")].status.scaling.capacity.concurrency == 8  # type: ignore[union-attr]
    run(fleet, {"tiny": Load(0)}, 1000)
    assert replicas(fleet) == 1
    run(fleet, {"tiny": Load(60)}, 40)
    assert replicas(fleet) >= 6


def test_capacity_survives_an_operator_that_restarts() -> None:
    fleet = loaded(35, 400)
    before = fleet.models[("team", "tiny")].status.scaling.capacity  # type: ignore[union-attr]
    fleet.traffic = TrafficView()
    fleet.step()
    after = fleet.models[("team", "tiny")].status.scaling
    assert after is not None
    assert after.capacity == before


def test_load_that_falls_takes_as_many_replicas_as_are_safe_through_a_drain() -> None:
    fleet = loaded(35, 400)
    plans = run(fleet, {"tiny": Load(8)}, COOLDOWN - 10)
    assert replicas(fleet) == 2
    drained = [d for plan in plans for d in plan.drains]
    assert {d.reason for d in drained} == {Reason.SCALED_DOWN}
    run(fleet, {"tiny": Load(8)}, 2 * COOLDOWN)
    assert replicas(fleet) == 2
    assert reason(fleet) == Reason.SCALE_DOWN_UNSAFE


def test_at_most_half_of_the_replicas_are_taken_per_cooldown() -> None:
    fleet = loaded(70, 400, most=8)
    before = replicas(fleet)
    assert before >= 7
    run(fleet, {"tiny": Load(before)}, COOLDOWN - 10)
    assert replicas(fleet) == before // 2


def test_of_replicas_that_did_nothing_lately_one_goes_per_cooldown() -> None:
    fleet = loaded(70, 400, most=8)
    before = replicas(fleet)
    run(fleet, {"tiny": Load(1)}, COOLDOWN - 10)
    assert replicas(fleet) == before - 1, "the next burst may come"


def test_of_a_model_that_nothing_was_measured_of_nothing_is_taken() -> None:
    fleet = Fleet(pool=CHAT_ONLY)
    fleet.add_model("tiny", elastic_spec().model_copy(update={"replicas": 4}))
    run(fleet, {"tiny": Load(0)}, 30)
    fleet.add_model("tiny", elastic_spec())
    put_load(fleet, {"tiny": Load(4)})
    (report,) = fleet.traffic.reports
    unmeasured = [
        r.model_copy(update={"report": r.report.model_copy(update={"engine": r.report.engine.model_copy(update=NOTHING_MEASURED)})})
        for r in report.models[0].replicas
        if r.report and r.report.engine
    ]
    model = report.models[0].model_copy(update={"replicas": unmeasured, "judged": 0, "attained": 0})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    assert is_quiet(fleet.step())
    assert reason(fleet) == Reason.SCALE_DOWN_UNSAFE
    run(fleet, {"tiny": Load(4)}, 30)
    assert replicas(fleet) < 4


def test_nothing_is_added_within_the_cooldown_of_a_removal() -> None:
    fleet = loaded(35, 400)
    run(fleet, {"tiny": Load(8)}, 10)
    assert replicas(fleet) == 2
    fleet.settle_with(lambda: put_load(fleet, {"tiny": Load(8)}))
    plans = run(fleet, {"tiny": Load(60)}, 30)
    assert not any(plan.creates for plan in plans)
    assert reason(fleet) == Reason.HOLD_COOLDOWN
    run(fleet, {"tiny": Load(60)}, COOLDOWN)
    assert replicas(fleet) > 2


def test_a_drain_is_cancelled_when_the_load_returns_after_the_cooldown() -> None:
    fleet = loaded(35, 400)
    fleet.pool = pool_spec(classes=[{"name": "chat"}], rebalancing={"cooldownSeconds": 10, "drainSeconds": 600})
    fleet.busy = {pod.uid for pod in fleet.of("tiny")}
    run(fleet, {"tiny": Load(8)}, 5)
    assert replicas(fleet) == 2
    plans = run(fleet, {"tiny": Load(60)}, 30)
    assert Reason.DRAIN_CANCELLED in reasons(plans)
    assert any(plan.cancels for plan in plans)


def test_a_removal_that_would_fill_the_kv_cache_is_unsafe() -> None:
    fleet = loaded(35, 400)
    put_load(fleet, {"tiny": Load(8)})
    (report,) = fleet.traffic.reports
    full = Utilisation(kv_cache_percent=70)
    replicas_full = [
        r.model_copy(update={"report": r.report.model_copy(update={"utilisation": full})}) for r in report.models[0].replicas if r.report
    ]
    model = report.models[0].model_copy(update={"replicas": replicas_full})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    assert is_quiet(fleet.step())
    assert reason(fleet) == Reason.SCALE_DOWN_UNSAFE


@pytest.mark.parametrize("claim", [{"model_name": "other"}, {"model_namespace": "other"}, {"pod_uid": "other"}])
def test_a_monitor_that_speaks_of_another_model_or_pod_is_not_believed(claim: dict[str, str]) -> None:
    fleet = loaded(5, 60)
    put_load(fleet, {"tiny": Load(30)})
    (report,) = fleet.traffic.reports
    liars = [r.model_copy(update={"report": r.report.model_copy(update=claim)}) for r in report.models[0].replicas if r.report]
    model = report.models[0].model_copy(update={"replicas": liars, "judged": 0})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    assert is_quiet(fleet.step())
    assert fleet.models[("team", "tiny")].status.scaling.data == "Partial"  # type: ignore[union-attr]


@pytest.mark.parametrize("data", [DataState.NO_DATA, DataState.STALE])
def test_without_data_nothing_moves_and_it_is_said(data: DataState) -> None:
    fleet = loaded(35, 400)
    put_load(fleet, {}, data)
    if data is DataState.NO_DATA:
        fleet.traffic = TrafficView()
    plan = fleet.step()
    assert is_quiet(plan)
    assert [c.reason for c in plan.choices] == [Reason.HOLD_NO_DATA]
    assert not fleet.step().choices, "said once"
    assert replicas(fleet) == 4


def test_partial_data_adds_and_does_not_remove() -> None:
    fleet = loaded(35, 400)
    put_load(fleet, {"tiny": Load(1)}, DataState.PARTIAL)
    assert is_quiet(fleet.step())
    assert reason(fleet) == Reason.HOLD_NO_DATA
    put_load(fleet, {"tiny": Load(80)}, DataState.PARTIAL)
    assert fleet.step().creates


def test_targets_that_no_replica_can_meet_do_not_run_away() -> None:
    fleet = Fleet(pool=CHAT_ONLY)
    fleet.add_model("tiny", elastic_spec())
    run(fleet, {}, 15)
    run(fleet, {"tiny": Load(1, base_tpot_ms=400)}, 600)
    assert replicas(fleet) == 1
    assert reason(fleet) == Reason.SLO_UNATTAINABLE


def test_the_models_maximum_is_kept_and_said() -> None:
    fleet = loaded(200, 600, most=3)
    assert replicas(fleet) == 3
    assert reason(fleet) == Reason.CLAMPED_BY_MAXIMUM


def test_a_class_ceiling_clamps_and_says_so() -> None:
    fleet = Fleet(pool=pool_spec())
    fleet.add_model("tiny", elastic_spec("chat"))
    run(fleet, {}, 15)
    plans = run(fleet, {"tiny": Load(200)}, 600)
    assert fleet.charged("chat") == 4
    assert reasons(plans).count(Reason.CLAMPED_BY_CEILING) == 1
    assert replicas(fleet) == 4, "what is granted"
    assert fleet.models[("team", "tiny")].status.scaling.wanted_replicas > 4  # type: ignore[union-attr]
    assert fleet.condition("tiny", "Ready")[0] == "True"
    assert fleet.condition("tiny", "CapacityAvailable")[1] == Reason.CLAMPED_BY_CEILING


def test_a_pin_turns_scaling_off_and_unpinning_starts_from_there() -> None:
    fleet = loaded(35, 400)
    fleet.add_model("tiny", elastic_spec().model_copy(update={"replicas": 6}))
    run(fleet, {"tiny": Load(35)}, 300)
    assert (replicas(fleet), reason(fleet)) == (6, Reason.PINNED)
    fleet.add_model("tiny", elastic_spec())
    run(fleet, {"tiny": Load(35)}, 10)
    assert replicas(fleet) == 6, "one fewer would come within the margin of a target"
    run(fleet, {"tiny": Load(12)}, 3 * COOLDOWN)
    assert replicas(fleet) < 6


def test_advisory_advises_from_what_runs_and_moves_nothing() -> None:
    fleet = loaded(5, 60)
    fleet.pool = pool_spec(classes=[{"name": "chat"}], mode="Advisory")
    plans = run(fleet, {"tiny": Load(200)}, 120)
    assert all(is_quiet(plan) for plan in plans)
    assert reasons(plans).count(Reason.PREDICTED_MISS) == 1
    assert Reason.PREDICTED_MISS not in reasons(run(fleet, {"tiny": Load(190)}, 30)), "the same advice, with other figures"
    assert len(fleet.of("tiny")) == 1
    assert replicas(fleet) == 3, "the advice starts from what runs, again and again"


def test_an_idle_model_goes_to_zero_and_wakes_on_demand() -> None:
    fleet = loaded(5, 60, least=0)
    assert replicas(fleet) == 1
    run(fleet, {}, COOLDOWN + 60)
    assert (replicas(fleet), len(fleet.of("tiny"))) == (0, 0)
    assert fleet.condition("tiny", "Available")[1] == Reason.SCALED_TO_ZERO
    assert "next one" in fleet.condition("tiny", "Available")[2]
    plans = run(fleet, {"tiny": Load(1)}, 5)
    assert reasons(plans)[0] == Reason.WOKEN_BY_DEMAND
    run(fleet, {"tiny": Load(1)}, 60)
    assert fleet.condition("tiny", "Ready")[0] == "True"


def test_a_model_at_zero_is_looked_at_often() -> None:
    fleet = loaded(0, 300, least=0)
    assert replicas(fleet) == 0
    assert fleet.plan().wake_after_seconds <= 2


def test_a_replica_with_requests_does_not_go_to_zero() -> None:
    fleet = loaded(1, 1200, least=0)
    assert replicas(fleet) == 1


def test_the_forecast_is_a_floor() -> None:
    fleet = loaded(35, 400)
    put_load(fleet, {"tiny": Load(35)})
    (report,) = fleet.traffic.reports
    rising = TrafficHistory(
        bucket_seconds=60,
        end_unix=fleet.now.timestamp(),
        buckets=[TrafficBucket(arrivals=10, generated_tokens=60 * 200 * i) for i in range(1, 7)],
    )
    model = report.models[0].model_copy(update={"history": rising})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    plan = fleet.step()
    assert plan.choices[0].reason == Reason.FORECAST_DEMAND
    assert replicas(fleet) > 4


def test_low_attainment_adds_once_its_window_is_that_of_the_present_replicas() -> None:
    fleet = loaded(15, 300)
    put_load(fleet, {"tiny": Load(15)})
    (report,) = fleet.traffic.reports
    poor = report.models[0].model_copy(update={"judged": 100, "attained": 80})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [poor]}),))
    before = replicas(fleet)
    plan = fleet.step()
    assert plan.choices[0].reason == Reason.ATTAINMENT_LOW
    assert replicas(fleet) == before + 1
    fleet.pass_time(10)
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [poor], "time_unix": fleet.now.timestamp()}),))
    assert not fleet.step().creates


def test_the_shortest_window_with_enough_requests_tells_attainment() -> None:
    fleet = loaded(15, 300)
    put_load(fleet, {"tiny": Load(15)})
    (report,) = fleet.traffic.reports
    few, enough = WindowAttainment(window_seconds=5, judged=3), WindowAttainment(window_seconds=30, judged=50, attained=49)
    late = report.models[0].model_copy(update={"judged": 900, "attained": 90, "windows": [few, enough]})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [late]}),))
    assert is_quiet(fleet.step()), "the misses of five minutes ago are over"


def test_bounds_that_change_are_kept_at_once() -> None:
    fleet = loaded(5, 60)
    fleet.add_model("tiny", elastic_spec(least=3))
    run(fleet, {"tiny": Load(5)}, 20)
    assert replicas(fleet) == 3
    fleet.add_model("tiny", elastic_spec(most=2))
    plans = run(fleet, {"tiny": Load(5)}, 20)
    assert replicas(fleet) == 2
    assert Reason.OUTSIDE_BOUNDS in reasons(plans)


def test_a_claim_to_the_guarantee_takes_from_an_elastic_borrower() -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "priority": 2, "minPercent": 50}, {"name": "code", "minPercent": 25}]))
    fleet.add_model("coder", elastic_spec("code", least=1))
    fleet.add_model("talker", elastic_spec("chat", least=1))
    run(fleet, {}, 15)
    run(fleet, {"coder": Load(200)}, 300)
    assert (fleet.charged("code"), fleet.charged("chat")) == (7, 1)
    plans = run(fleet, {"coder": Load(200), "talker": Load(200)}, 600)
    assert (fleet.charged("code"), fleet.charged("chat")) == (4, 4)
    assert Reason.RECLAIMED_FOR_GUARANTEE in reasons(plans)
    later = run(fleet, {"coder": Load(200), "talker": Load(200)}, 1800)
    assert all(is_quiet(plan) for plan in later)


def test_a_class_whose_load_falls_lends_again() -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "priority": 2, "minPercent": 50}, {"name": "code", "minPercent": 25}]))
    fleet.add_model("coder", elastic_spec("code", least=1))
    fleet.add_model("talker", elastic_spec("chat", least=1))
    run(fleet, {}, 15)
    run(fleet, {"coder": Load(200), "talker": Load(200)}, 600)
    run(fleet, {"coder": Load(200)}, 1800)
    assert (fleet.charged("code"), fleet.charged("chat")) == (7, 1)


@pytest.mark.parametrize("jump", [timedelta(days=-3650), timedelta(days=3650), timedelta(hours=-1), timedelta(hours=1)])
def test_a_clock_that_jumps_takes_nothing_away(jump: timedelta) -> None:
    fleet = loaded(35, 400)
    before = {pod.uid for pod in fleet.of("tiny")}
    put_load(fleet, {"tiny": Load(0)})
    fleet.now += jump
    for _ in range(5):
        plan = fleet.step()
        assert not plan.drains
        assert not plan.deletes
    assert {pod.uid for pod in fleet.of("tiny")} >= before
    run(fleet, {"tiny": Load(0)}, 5 * (COOLDOWN + DRAIN_SECONDS))
    assert replicas(fleet) == 1, "it goes on once reports and clock agree"


def test_models_of_unequal_size_are_packed_so_that_a_large_one_finds_a_whole_node() -> None:
    fleet = Fleet(nodes={"a": node("a", 8), "b": node("b", 8)}, pool=CHAT_ONLY)
    fleet.add_model("small", model_spec(replicas=6))
    fleet.settle()
    fleet.add_model("large", model_spec(parallelism={"tensor": 8}))
    fleet.settle()
    assert len(fleet.of("large")) == 1
    assert fleet.of("large")[0].node == "b"


def test_a_lost_status_is_rebuilt_from_what_runs() -> None:
    fleet = loaded(35, 400)
    model = fleet.models[("team", "tiny")]
    fleet.models[("team", "tiny")] = replace(model, status=type(model.status)())
    plans = run(fleet, {"tiny": Load(35)}, 60)
    assert all(is_quiet(plan) for plan in plans)
    assert replicas(fleet) == 4
