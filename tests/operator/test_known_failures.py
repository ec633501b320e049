"""What went wrong in other autoscalers, each as a case of ours. The comment names the report that it was learned from."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from npufleet_api.conditions import Reason
from npufleet_api.contract import EngineState
from npufleet_api.report import DataState
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import EngineProbe, TrafficView
from support.fleet import DRAIN_SECONDS, RESOURCE, Fleet, is_quiet, model_spec, node, pool_spec
from support.load import Load, elastic_spec, loaded, put_load, run

CHAT_ONLY = pool_spec(classes=[{"name": "chat"}])


def granted(fleet: Fleet) -> int:
    """Replicas that the pool grants."""
    return fleet.models[("team", "tiny")].status.desired_replicas


def reasons(plans: list[Plan]) -> list[str]:
    """Reasons of all decisions, in order."""
    return [choice.reason for plan in plans for choice in plan.choices]


def test_the_same_deficit_is_not_filled_again_while_replicas_load() -> None:
    # aibrix 2670: 2, 4, 8, 16 replicas while pods were loading
    fleet = loaded(5)
    fleet.auto_ready = False
    plans = run(fleet, {"tiny": Load(15)}, 30)
    assert granted(fleet) == 3, "15 requests, of which a replica was seen to carry 5"
    assert sum(len(plan.creates) for plan in plans) == 2


def test_replicas_that_never_get_to_serve_are_added_ever_more_slowly() -> None:
    # aibrix 2670 and dynamo 14251 between them: neither doubled nor frozen
    fleet = loaded(5)
    fleet.auto_ready = False
    run(fleet, {"tiny": Load(15)}, 300)
    assert 3 < granted(fleet) <= 6


def test_a_replica_whose_files_still_come_is_not_joined_by_others() -> None:
    # aibrix 2670 again: a first fetch of 145 GB takes far longer than a start from the cache
    fleet = loaded(5)
    fleet.auto_ready = False
    for _ in range(60):
        fleet.pods = {uid: pod if pod.engine_ready else replace(pod, fetching=True) for uid, pod in fleet.pods.items()}
        run(fleet, {"tiny": Load(15)}, 15)
    assert granted(fleet) == 3


def test_replicas_go_within_a_bounded_time_once_the_load_has_ended() -> None:
    # aibrix 1159: delayed by half an hour
    fleet = loaded(35, 400)
    surplus = granted(fleet) - 1
    run(fleet, {}, surplus * (120 + 15) + DRAIN_SECONDS)
    assert len(fleet.of("tiny")) == 1


def test_nobody_else_can_write_the_number_of_replicas() -> None:
    # aibrix 1661: two writers of one field
    fleet = loaded(5)
    for manifest in fleet.plan().objects:
        if manifest["metadata"].get("ownerReferences"):
            assert "replicas" not in manifest.get("spec", {})
            assert manifest["kind"] not in ("Deployment", "StatefulSet", "ReplicaSet", "HorizontalPodAutoscaler")


def test_a_request_at_zero_replicas_wakes_the_model() -> None:
    # aibrix 476: the request failed; GIE 2117: it waited for ever
    fleet = loaded(0, 300, least=0)
    assert granted(fleet) == 0
    run(fleet, {"tiny": Load(1)}, 30)
    assert fleet.condition("tiny", "Available")[0] == "True"


def test_a_request_that_was_turned_away_at_zero_wakes_the_model_too() -> None:
    # keda 7239: a fallback that never left 0
    fleet = loaded(0, 300, least=0)
    put_load(fleet, {})
    (report,) = fleet.traffic.reports
    turned_away = report.models[0].outcomes.model_copy(update={"no_replica": 1})
    model = report.models[0].model_copy(update={"outcomes": turned_away, "last_request_age_seconds": 2.0})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    assert fleet.step().creates


def test_one_unready_replica_does_not_blind_scaling() -> None:
    # kthena 1403: all metrics discarded because of one pod
    fleet = loaded(15, 300)
    assert granted(fleet) == 2
    fleet.auto_ready = False
    sick = fleet.of("tiny")[0]
    fleet.pods[sick.uid] = replace(sick, engine_ready=False, created=fleet.now - timedelta(hours=1))
    plans = run(fleet, {"tiny": Load(40)}, 30)
    assert any(plan.creates for plan in plans)


def test_scaling_down_drains_before_it_deletes() -> None:
    # kthena 1589: requests interrupted
    fleet = loaded(35, 400)
    fleet.busy = {pod.uid for pod in fleet.of("tiny")}
    plans = run(fleet, {"tiny": Load(4)}, DRAIN_SECONDS - 10, step=1)
    assert any(plan.drains for plan in plans)
    assert not any(plan.deletes for plan in plans)


def test_a_replica_has_the_whole_drain_to_finish_and_more() -> None:
    # dynamo 13559: streams aborted 5 s after SIGTERM
    fleet = Fleet(pool=CHAT_ONLY)
    fleet.add_model("tiny", model_spec())
    (create,) = fleet.plan().creates
    assert create.manifest["spec"]["terminationGracePeriodSeconds"] >= DRAIN_SECONDS + 30


def test_a_pod_that_cannot_be_scheduled_does_not_freeze_scaling() -> None:
    # dynamo 14251: frozen for over an hour
    fleet = loaded(15, 300)
    stuck = replace(
        fleet.of("tiny")[0], uid="stuck", name="tiny-stuck-9", node="", engine_ready=False, engine_started=False, ready_since=None,
        scheduling_message="0/1 nodes are available: insufficient cpu", created=fleet.now,
    )  # fmt: skip
    fleet.pods["stuck"] = stuck
    fleet.nodes["node-0"] = node("node-0", 8)
    for model in list(fleet.models):
        status = fleet.models[model].status
        fleet.models[model] = replace(fleet.models[model], status=status.model_copy(update={"desired_replicas": 3}))
    before = len(fleet.pods)
    for _ in range(60):
        fleet.pods["stuck"] = stuck
        put_load(fleet, {"tiny": Load(60)})
        fleet.step(5)
    assert len(fleet.pods) > before


def test_moves_between_models_never_pass_the_supply() -> None:
    # dynamo 12428: two writes that were not one
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "priority": 2, "minPercent": 50}, {"name": "code"}]))
    fleet.add_model("coder", model_spec("code", 8))
    fleet.settle()
    fleet.busy = {pod.uid for pod in fleet.of("coder")}
    fleet.add_model("talker", model_spec("chat", 4))
    for _ in range(5 * DRAIN_SECONDS):
        fleet.step()
        assert fleet.charged() <= 8
    assert fleet.charged("chat") == 4


def test_two_planners_that_see_the_same_decide_the_same() -> None:
    # dynamo 7416: replicas judged the budget on different state
    fleet = loaded(35, 60)
    put_load(fleet, {"tiny": Load(35)})
    assert fleet.plan() == fleet.plan()


def test_every_plan_names_all_children_so_that_an_edit_is_repaired() -> None:
    # dynamo 4420: an edited child was never repaired
    fleet = loaded(5)
    first = {(m["kind"], m["metadata"]["name"]) for m in fleet.step().objects}
    assert {(m["kind"], m["metadata"]["name"]) for m in fleet.step().objects} == first


def test_without_metrics_the_minimum_still_holds() -> None:
    # dynamo 14575: an early return skipped the clamp
    fleet = loaded(5)
    fleet.traffic = TrafficView()
    fleet.add_model("tiny", elastic_spec(least=3))
    fleet.step()
    assert granted(fleet) == 3


def test_what_is_said_of_deleted_pods_is_not_counted() -> None:
    # llm-d-autoscaling 368: phantom load scaled up
    fleet = loaded(5)
    put_load(fleet, {"tiny": Load(200)})
    phantom = fleet.traffic
    (report,) = phantom.reports
    ghosts = [
        r.model_copy(update={"pod_uid": "gone", "report": r.report.model_copy(update={"pod_uid": "gone"})})
        for r in report.models[0].replicas
        if r.report
    ]
    model = report.models[0].model_copy(update={"replicas": ghosts, "judged": 0, "in_flight": 5})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [model]}),))
    assert is_quiet(fleet.step())


def test_reports_of_another_name_are_no_data_and_it_is_said() -> None:
    # llm-d 2310: labels that did not match left the autoscaler inert, and the object said Ready
    fleet = loaded(5)
    put_load(fleet, {"tiny": Load(200)})
    (report,) = fleet.traffic.reports
    other = report.models[0].model_copy(update={"name": "other"})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [other]}),))
    plan = fleet.step()
    assert is_quiet(plan)
    assert [c.reason for c in plan.choices] == [Reason.HOLD_NO_DATA]


def test_no_report_is_not_read_as_no_load() -> None:
    # keda 3065: an empty answer was read as 0, and the peak was scaled to the minimum
    fleet = loaded(35, 400)
    for _ in range(100):
        fleet.traffic = TrafficView()
        assert is_quiet(fleet.step(10))
    assert granted(fleet) == 4


def test_a_gateway_that_has_just_started_has_not_seen_an_idle_window() -> None:
    # keda 3065, kubeai 383: counters that begin anew look like silence
    fleet = loaded(5, 300, least=0)
    put_load(fleet, {})
    (report,) = fleet.traffic.reports
    young = report.models[0].model_copy(update={"last_request_age_seconds": None})
    fleet.traffic = TrafficView(DataState.FRESH, (report.model_copy(update={"models": [young], "uptime_seconds": 5.0}),))
    assert is_quiet(fleet.step())


def test_surge_replicas_of_a_rollout_are_not_counted_as_a_new_base() -> None:
    # kubernetes 84142, 72775: 383 replicas became 664
    fleet = loaded(35, 400)
    fleet.add_model("tiny", elastic_spec(engine={"maxNumSequences": 7}))
    peak = 0
    for _ in range(100):
        put_load(fleet, {"tiny": Load(30)})
        fleet.step()
        peak = max(peak, len(fleet.of("tiny")))
    assert granted(fleet) == 4
    assert peak == 5
    assert fleet.condition("tiny", "RolledOut")[0] == "True"


def test_after_a_restart_without_a_request_replicas_still_go() -> None:
    # kubeai 383; knative 3153
    fleet = loaded(35, 400)
    model = fleet.models[("team", "tiny")]
    fleet.models[("team", "tiny")] = replace(model, status=type(model.status)())
    run(fleet, {}, 1000)
    assert granted(fleet) == 1


def test_the_end_of_a_burst_takes_no_more_than_what_is_left_needs() -> None:
    # knative 3153: a bad decision on leaving panic
    fleet = loaded(15, 300)
    steady = granted(fleet)
    run(fleet, {"tiny": Load(70)}, 120)
    peak = lowest = granted(fleet)
    assert peak > steady
    for _ in range(200):
        run(fleet, {"tiny": Load(15)}, 10)
        lowest = min(lowest, granted(fleet))
    assert steady <= lowest < peak
    assert granted(fleet) == lowest, "nothing that was taken had to be added again"


def test_a_request_that_is_held_at_zero_stays_demand_until_a_replica_serves() -> None:
    # GIE 2117: requests queued at zero were never dispatched
    fleet = loaded(0, 300, least=0)
    fleet.auto_ready = False
    run(fleet, {"tiny": Load(1)}, 900)
    assert granted(fleet) >= 1
    assert len(fleet.of("tiny")) >= 1, "a replica that takes long is waited for, not given up"
    fleet.auto_ready = True
    run(fleet, {"tiny": Load(1)}, 15)
    assert fleet.condition("tiny", "Available")[0] == "True"


def test_an_optional_kind_that_the_cluster_lacks_stops_nothing() -> None:
    # ome 425: reconciling failed where an optional CRD was absent
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat"}], gateway={"httpRoute": {"parentRefs": [{"name": "front"}]}}))
    fleet.add_model("tiny", model_spec())
    fleet.settle()
    assert fleet.condition("tiny", "Ready")[0] == "True"
    assert "HTTPRoute" not in {m["kind"] for m in fleet.plan().objects}
    gateway = fleet.pool_status.condition("GatewayAvailable")
    assert gateway is not None
    assert gateway.reason == Reason.ROUTE_KIND_MISSING


def test_scaling_that_is_inert_says_so_while_it_lasts() -> None:
    # llm-d 2310: the object stayed Ready and nobody could see that nothing was decided
    fleet = loaded(5)
    fleet.traffic = TrafficView()
    fleet.step()
    fleet.step()
    scaling = fleet.models[("team", "tiny")].status.scaling
    assert scaling is not None
    assert (scaling.reason, scaling.data) == (Reason.HOLD_NO_DATA, DataState.NO_DATA)


def test_nodes_that_come_and_go_leave_neither_a_gap_nor_a_replica_too_many() -> None:
    # kubelets of an overloaded cluster are late: each time a third replica came, and was drained
    fleet = Fleet(nodes={f"node-{i}": node(f"node-{i}", 4) for i in range(3)})
    fleet.add_model("tiny", model_spec("code", 2))
    fleet.settle()
    for beat in range(12):
        home = fleet.of("tiny")[0].node
        fleet.nodes[home] = replace(fleet.nodes[home], ready=beat % 2 == 1)
        for _ in range(5):
            fleet.step(2)
            assert len(fleet.of("tiny")) <= 2 + 2
    for name in fleet.nodes:
        fleet.nodes[name] = node(name, 4)
    fleet.settle()
    assert len(fleet.of("tiny")) == 2


def test_borrower_and_lender_do_not_preempt_each_other_for_ever() -> None:
    # kueue 3779, 7101, 14543
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "minPercent": 50}, {"name": "code", "minPercent": 50}]))
    fleet.add_model("coder", model_spec("code", 8))
    fleet.add_model("talker", model_spec("chat", 8))
    fleet.settle()
    for _ in range(50):
        assert is_quiet(fleet.step(30))
    assert (fleet.charged("chat"), fleet.charged("code")) == (4, 4)


def test_a_change_of_the_spec_keeps_the_number_of_replicas() -> None:
    # nim-operator 681: an update reset an autoscaled workload to 1; ome 425: one missing optional kind stopped everything
    fleet = loaded(35, 400)
    fleet.add_model("tiny", elastic_spec(slo={"ttftMilliseconds": 999, "tpotMilliseconds": 50}))
    put_load(fleet, {"tiny": Load(35)})
    plan = fleet.step()
    assert is_quiet(plan)
    assert granted(fleet) == 4
    assert {m["apiVersion"].split("/")[0] for m in plan.objects} <= {"v1", "apps", "policy", "networking.k8s.io"}


def test_a_reservation_that_never_starts_does_not_keep_a_guarantee_waiting() -> None:
    # kueue and volcano hold quota for pods that do not run
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "priority": 2, "minPercent": 50}, {"name": "code"}]), auto_ready=False)
    fleet.add_model("coder", model_spec("code", 8))
    fleet.step()
    for pod in fleet.of("coder"):
        fleet.pods[pod.uid] = replace(pod, node="", scheduling_message="0/1 nodes are available: insufficient cpu")
    fleet.add_model("talker", model_spec("chat", 1))
    plan = fleet.step(0)
    assert [d.reason for d in plan.deletes] == [Reason.RECLAIMED_FOR_GUARANTEE]


def test_an_engine_that_hangs_in_its_drain_ends_at_the_deadline() -> None:
    # a drain without an end would keep a guarantee waiting for ever
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "priority": 2, "minPercent": 50}, {"name": "code"}]))
    fleet.add_model("coder", model_spec("code", 8))
    fleet.settle()
    fleet.add_model("talker", model_spec("chat", 1))
    fleet.step()
    for _ in range(DRAIN_SECONDS + 5):
        fleet.probes = {uid: EngineProbe(EngineState.DRAINING, running=1) for uid in fleet.probes}
        fleet.step()
    assert len(fleet.of("talker")) == 1
    assert all(pod.requests[RESOURCE] == 1 for pod in fleet.pods.values())
