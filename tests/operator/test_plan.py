"""Table cases of the planner: what it decides in one situation each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npufleet_api.conditions import Reason
from npufleet_api.contract import EngineState
from npufleet_operator.core.observed import EngineProbe
from npufleet_operator.core.plan import make_plan
from support.fleet import DRAIN_SECONDS, RESOURCE, Fleet, is_quiet, model_spec, node, pool_spec


def served(name: str = "tiny", **spec: object) -> Fleet:
    """A fleet that serves one model."""
    fleet = Fleet()
    fleet.add_model(name, model_spec(**spec))  # type: ignore[arg-type]  # keyword arguments of model_spec
    fleet.settle()
    return fleet


def test_a_new_model_gets_its_replicas_and_becomes_ready() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec(replicas=2))
    first = fleet.step()
    assert [c.manifest["metadata"]["name"][-2:] for c in first.creates] == ["-0", "-1"]
    assert fleet.condition("tiny", "Ready")[1] == Reason.LOADING
    fleet.settle()
    assert fleet.condition("tiny", "Ready") == ("True", Reason.READY, "2 of 2 replicas serve")
    assert fleet.models[("team", "tiny")].status.npus == 2


def test_a_model_without_a_pool_keeps_what_runs_and_is_told() -> None:
    fleet = served()
    fleet.pool = None
    plan = fleet.step()
    assert is_quiet(plan)
    assert not plan.prune_gateway
    assert not plan.objects
    assert fleet.condition("tiny", "Ready")[:2] == ("False", Reason.POOL_NOT_FOUND)
    assert fleet.models[("team", "tiny")].status.ready_replicas == 1


def test_the_gateway_of_a_deleted_pool_goes_once_its_pods_are_gone() -> None:
    fleet = served()
    fleet.pool = None
    fleet.models.clear()
    assert not fleet.plan().prune_gateway
    fleet.pods.clear()
    assert fleet.plan().prune_gateway


@pytest.mark.parametrize(
    ("spec", "reason", "named"),
    [
        (model_spec("missing"), Reason.CLASS_NOT_FOUND, "spec.workloadClass"),
        (model_spec(parallelism={"pipeline": 2}), Reason.NOT_IMPLEMENTED, "spec.parallelism.pipeline"),
        (model_spec(runtime={"name": "VLLMAscend"}), Reason.IMAGE_NOT_ALLOWED, "spec.runtime.name"),
        (model_spec(model={"uri": "hf://Qwen/Qwen2.5-72B/Instruct"}), Reason.SPEC_REFUSED, "spec.model.uri"),
        (model_spec(model={"uri": "obs://bucket/model"}), Reason.SPEC_REFUSED, "spec.model.region"),
    ],
)
def test_what_cannot_be_served_is_refused_with_field_and_remedy(spec: object, reason: Reason, named: str) -> None:
    fleet = Fleet()
    fleet.add_model("tiny", spec)  # type: ignore[arg-type]  # an AscendModelSpec
    assert is_quiet(fleet.step())
    for kind in ("Accepted", "Ready"):
        status, found, message = fleet.condition("tiny", kind)
        assert (status, found) == ("False", reason)
        assert named in message


def test_a_namespace_outside_the_selector_may_not_claim_the_class() -> None:
    fleet = Fleet(
        pool=pool_spec(
            classes=[{"name": "chat", "namespaceSelector": {"matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold"]}]}}]
        )
    )
    fleet.add_model("tiny", model_spec())
    fleet.step()
    assert fleet.condition("tiny", "Accepted")[1] == Reason.NAMESPACE_NOT_ALLOWED
    fleet.namespaces = {"team": {"tier": "gold"}}
    fleet.settle()
    assert fleet.condition("tiny", "Ready")[0] == "True"


def test_a_refused_change_keeps_the_running_revision() -> None:
    fleet = served()
    before = fleet.of("tiny")
    fleet.add_model("tiny", model_spec(parallelism={"pipeline": 2}))
    assert is_quiet(fleet.step())
    assert fleet.of("tiny") == before
    assert fleet.models[("team", "tiny")].status.ready_replicas == 1
    assert any(kind == "ConfigMap" for kind, _, _ in fleet.objects)


def test_fields_without_effect_are_named() -> None:
    fleet = Fleet()
    spec = model_spec(
        replicas=None,
        slo={"ttftMilliseconds": 500},
        scaling={"minReplicas": 1, "maxReplicas": 4},
        engine={"profile": "HighConcurrencyChat", "pipelineDepth": 4, "fusionLevel": 3},
        model={"uri": "pvc://weights/tiny", "revision": "main"},
    )
    fleet.add_model("tiny", spec)
    fleet.step()
    status, reason, message = fleet.condition("tiny", "NotYetEffective")
    assert (status, reason) == ("True", Reason.FIELDS_NOT_YET_EFFECTIVE)
    assert "model.revision" in message
    for field in ("slo", "scaling", "engine.profile", "engine.pipelineDepth", "engine.fusionLevel"):
        assert field not in message


def test_scale_up_starts_the_missing_and_scale_down_drains_the_surplus() -> None:
    fleet = served(replicas=1)
    fleet.add_model("tiny", model_spec(replicas=3))
    fleet.settle()
    assert len(fleet.of("tiny")) == 3
    fleet.add_model("tiny", model_spec(replicas=1))
    plan = fleet.step()
    assert len(plan.drains) == 2
    assert not plan.deletes
    fleet.settle()
    assert len(fleet.of("tiny")) == 1


def test_a_drain_waits_for_running_requests_and_ends_at_its_deadline() -> None:
    fleet = served(replicas=2)
    fleet.busy = {pod.uid for pod in fleet.of("tiny")}
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    for _ in range(DRAIN_SECONDS - 2):
        assert not fleet.step().deletes
    fleet.step()
    plan = fleet.step()
    assert [d.reason for d in plan.deletes] == [Reason.DRAIN_DEADLINE]


def test_a_draining_replica_stays_charged_until_its_pod_is_gone() -> None:
    fleet = served(replicas=2)
    fleet.busy = {pod.uid for pod in fleet.of("tiny")}
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    fleet.step()
    assert fleet.models[("team", "tiny")].status.npus == 2
    assert fleet.pool_status.draining == 1


def test_a_drain_for_scale_down_is_cancelled_when_the_replica_is_wanted_again() -> None:
    fleet = served(replicas=2)
    fleet.busy = {pod.uid for pod in fleet.of("tiny")}
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    fleet.add_model("tiny", model_spec(replicas=2))
    plan = fleet.step()
    assert len(plan.cancels) == 1
    assert not plan.creates
    fleet.settle()
    assert len(fleet.of("tiny")) == 2


def test_an_engine_that_does_not_answer_is_unknown_not_idle() -> None:
    fleet = served(replicas=2)
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    fleet.probes = {uid: EngineProbe(state=None) for uid in fleet.probes}
    plan = fleet.plan()
    assert not plan.deletes
    assert len(plan.drains) == 1, "it is asked again"


def test_a_rollout_with_spare_npus_surges_and_never_has_less_ready_than_wanted() -> None:
    fleet = served(replicas=2)
    fleet.add_model("tiny", model_spec(replicas=2, engine={"maxNumSequences": 7}))
    seen = set()
    for _ in range(60):
        fleet.step()
        ready = [pod for pod in fleet.of("tiny") if pod.engine_ready]
        seen.add(len(fleet.of("tiny")))
        assert len(ready) >= 2
    assert max(seen) == 3
    assert fleet.condition("tiny", "RolledOut")[0] == "True"


def test_without_spare_npus_one_replica_is_replaced_at_a_time() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 2)}, pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.settle()
    fleet.add_model("tiny", model_spec(replicas=2, engine={"maxNumSequences": 7}))
    for _ in range(60):
        fleet.step()
        assert sum(pod.engine_ready for pod in fleet.of("tiny")) >= 1
        assert fleet.charged() <= 2
    assert fleet.condition("tiny", "RolledOut")[0] == "True"


def test_the_only_replica_is_not_taken_away_without_spare_npus_unless_recreate_is_chosen() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 1)}, pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", model_spec())
    fleet.settle()
    fleet.add_model("tiny", model_spec(engine={"maxNumSequences": 7}))
    assert is_quiet(fleet.step())
    assert fleet.condition("tiny", "RolledOut")[:2] == ("False", Reason.WAITING_FOR_SPARE)
    assert fleet.condition("tiny", "Ready")[0] == "True"
    fleet.add_model("tiny", model_spec(engine={"maxNumSequences": 7}, rollout="Recreate"))
    fleet.settle()
    assert fleet.condition("tiny", "RolledOut")[0] == "True"


def test_a_revision_that_never_gets_ready_leaves_the_old_one_serving() -> None:
    fleet = served(replicas=2)
    fleet.auto_ready = False
    fleet.add_model("tiny", model_spec(replicas=2, engine={"maxNumSequences": 7}))
    for _ in range(30):
        fleet.step()
    assert sum(pod.engine_ready for pod in fleet.of("tiny")) == 2
    assert fleet.charged() == 3
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.auto_ready = True
    fleet.settle()
    assert len(fleet.of("tiny")) == 2
    assert fleet.condition("tiny", "RolledOut")[0] == "True"


def test_a_cordoned_node_is_left_after_the_replacement_serves() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 4), "node-1": node("node-1", 4)})
    fleet.add_model("tiny", model_spec())
    fleet.settle()
    home = fleet.of("tiny")[0].node
    fleet.nodes[home] = replace(fleet.nodes[home], schedulable=False)
    drained = []
    for _ in range(30):
        plan = fleet.step()
        drained += [d.reason for d in plan.drains]
        assert any(pod.engine_ready for pod in fleet.of("tiny"))
    assert drained == [Reason.NODE_MAINTENANCE]
    assert [pod.node != home for pod in fleet.of("tiny")] == [True]


def test_replicas_on_a_cordoned_node_stay_while_no_other_node_has_room() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec(replicas=3))
    fleet.settle()
    before = {pod.uid for pod in fleet.of("tiny")}
    fleet.nodes["node-0"] = replace(fleet.nodes["node-0"], schedulable=False)
    for _ in range(10):
        plan = fleet.step()
        assert not plan.drains
        assert not plan.deletes
    assert fleet.condition("tiny", "RolledOut")[1] == Reason.WAITING_FOR_SPARE
    fleet.nodes["node-0"] = replace(fleet.nodes["node-0"], schedulable=True)
    fleet.settle()
    assert {pod.uid for pod in fleet.of("tiny")} == before


def test_a_cordoned_node_is_left_one_by_one_where_only_the_ceiling_is_in_the_way() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 4)})
    fleet.add_model("tiny", model_spec(replicas=4))
    fleet.settle()
    assert len(fleet.of("tiny")) == 2, "half of four"
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.nodes["node-0"] = replace(fleet.nodes["node-0"], schedulable=False)
    fleet.nodes["node-1"] = node("node-1", 1)
    for _ in range(60):
        fleet.step()
        assert any(pod.engine_ready for pod in fleet.of("tiny"))
    assert sorted(pod.node for pod in fleet.of("tiny")) == ["node-0", "node-1"]


def test_a_failed_pod_is_removed_and_replaced_under_another_name() -> None:
    fleet = served()
    pod = fleet.of("tiny")[0]
    fleet.pods[pod.uid] = replace(pod, phase="Failed", engine_ready=False)
    plan = fleet.step()
    assert [d.pod.uid for d in plan.deletes] == [pod.uid]
    assert plan.creates[0].manifest["metadata"]["name"] != pod.name


def test_a_terminating_pod_keeps_its_name_and_its_npus() -> None:
    fleet = served()
    pod = fleet.of("tiny")[0]
    fleet.pods[pod.uid] = replace(pod, terminating=True, engine_ready=False)
    plan = fleet.plan()
    assert plan.creates[0].manifest["metadata"]["name"] != pod.name
    assert plan.model_status[("team", "tiny")].npus == 1


def test_a_model_too_big_for_any_node_is_told_so() -> None:
    fleet = Fleet(nodes={})
    fleet.add_model("tiny", model_spec())
    fleet.step()
    assert fleet.condition("tiny", "CapacityAvailable")[1] == Reason.NO_NODES
    assert fleet.pool_status.condition("Ready").reason == Reason.NO_NODES  # type: ignore[union-attr]


def test_a_full_pool_starts_what_fits_and_says_what_is_missing() -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", model_spec(replicas=10))
    fleet.settle()
    assert len(fleet.of("tiny")) == 8
    status, reason, message = fleet.condition("tiny", "CapacityAvailable")
    assert (status, reason) == ("False", Reason.NO_CAPACITY)
    assert "10 replicas" in message
    assert fleet.condition("tiny", "Ready")[1] == Reason.DEGRADED


def test_a_class_stops_at_its_ceiling() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec("chat", replicas=8))
    fleet.settle()
    assert fleet.charged("chat") == 4
    assert fleet.condition("tiny", "CapacityAvailable")[1] == Reason.CLAMPED_BY_CEILING


def test_a_ceiling_that_holds_no_replica_is_told() -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "maxPercent": 5}]))
    fleet.add_model("tiny", model_spec())
    fleet.step()
    assert fleet.condition("tiny", "CapacityAvailable")[1] == Reason.CEILING_BELOW_REPLICA


def test_a_clamp_is_said_once_and_not_in_every_cycle() -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec("chat", replicas=8))
    fleet.settle()
    said = [d for d in fleet.pool_status.decisions if d.reason == Reason.CLAMPED_BY_CEILING]
    for _ in range(5):
        fleet.step()
    assert [d for d in fleet.pool_status.decisions if d.reason == Reason.CLAMPED_BY_CEILING] == said


def test_guarantees_are_served_before_borrowers() -> None:
    fleet = Fleet(pool=pool_spec())
    fleet.add_model("greedy", model_spec("code", replicas=8))
    fleet.add_model("writer", model_spec("document", replicas=2))
    fleet.add_model("talker", model_spec("chat", replicas=1))
    fleet.settle()
    assert fleet.charged("document") == 2
    assert fleet.charged("chat") == 1
    assert fleet.charged() == 8


def test_foreign_pods_take_from_the_supply() -> None:
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", model_spec(replicas=8))
    fleet.settle()
    stranger = replace(fleet.of("tiny")[0], uid="stranger", name="stranger", owner_uid="", owner_name="", labels={}, requests={RESOURCE: 3})
    fleet.pods = {"stranger": stranger}
    fleet.settle()
    assert fleet.pool_status.foreign == 3
    assert fleet.pool_status.supply == 5
    assert len(fleet.of("tiny")) == 5


def test_an_unhealthy_card_shows_and_takes_nothing_away() -> None:
    fleet = served(replicas=1)
    fleet.nodes["node-0"] = node("node-0", allocatable={RESOURCE: 7})
    assert is_quiet(fleet.step())
    condition = fleet.pool_status.condition("CapacityAvailable")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", Reason.NPU_UNHEALTHY)
    assert (fleet.pool_status.nominal, fleet.pool_status.supply) == (8, 7)


def test_advisory_decides_and_changes_nothing() -> None:
    fleet = Fleet(pool=pool_spec(mode="Advisory"))
    fleet.add_model("tiny", model_spec())
    plan = fleet.step()
    assert is_quiet(plan)
    assert not plan.objects
    assert [c.reason for c in plan.choices] == [Reason.SCALED_UP]
    assert not fleet.step().choices, "the same advice is given once"


def test_the_older_model_keeps_a_served_name() -> None:
    fleet = Fleet()
    shared = {"uri": "pvc://weights/tiny", "servedName": "assistant"}
    fleet.add_model("old", model_spec(model=shared))
    fleet.add_model("new", model_spec(model=shared))
    fleet.settle()
    assert fleet.condition("old", "Routed")[0] == "True"
    status, reason, message = fleet.condition("new", "Routed")
    assert (status, reason) == ("False", Reason.SERVED_NAME_TAKEN)
    assert "team/new" in message


def test_drain_seconds_change_without_a_rollout() -> None:
    fleet = served()
    fleet.pool = pool_spec(rebalancing={"drainSeconds": 300})
    plan = fleet.step()
    assert is_quiet(plan)
    settings = next(o for o in plan.objects if o["kind"] == "ConfigMap" and "engine.yaml" in o["data"])
    assert '"drainSeconds": 300.0' in settings["data"]["engine.yaml"]


def test_a_settings_map_stays_while_a_pod_of_its_revision_lives() -> None:
    fleet = served(replicas=2)
    old = {o for o in fleet.objects if o[0] == "ConfigMap" and "monitor" not in o[2]}
    fleet.add_model("tiny", model_spec(replicas=2, engine={"maxNumSequences": 7}))
    fleet.step()
    assert old <= fleet.objects
    fleet.settle()
    fleet.step()
    assert not old & fleet.objects


def test_names_that_are_no_labels_get_a_slug() -> None:
    fleet = Fleet()
    fleet.add_model("qwen2.5-0.1b", model_spec())
    plan = fleet.step()
    for name in [c.manifest["metadata"]["name"] for c in plan.creates] + [o["metadata"]["name"] for o in plan.objects]:
        assert "." not in name
        assert len(name) <= 63


def test_loading_engine_that_is_not_wanted_any_more_goes_without_waiting() -> None:
    fleet = Fleet(auto_ready=False)
    fleet.add_model("tiny", model_spec(replicas=2))
    fleet.step()
    pods = fleet.of("tiny")
    for pod in pods:
        fleet.pods[pod.uid] = replace(pod, engine_started=True, node="node-0")
    fleet.add_model("tiny", model_spec(replicas=1))
    fleet.step()
    fleet.probes = {uid: EngineProbe(EngineState.LOADING) for uid in fleet.probes}
    assert [d.reason for d in fleet.step().deletes] == [Reason.DRAIN_COMPLETED]


def test_cards_that_fail_under_running_replicas_are_not_given_out_again_elsewhere() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 4)}, pool=pool_spec(classes=[{"name": "chat"}]))
    fleet.add_model("tiny", model_spec(replicas=4))
    fleet.settle()
    fleet.nodes = {"node-0": node("node-0", 4, allocatable={RESOURCE: 2}), "node-1": node("node-1", 4)}
    fleet.add_model("tiny", model_spec(replicas=8))
    fleet.settle()
    assert fleet.pool_status.supply == 6
    assert fleet.charged() == 6


def test_a_replica_of_several_ranks_is_charged_for_each_and_stays_on_one_node() -> None:
    fleet = Fleet(nodes={name: node(name, 3) for name in ("a", "b")})
    fleet.add_model("big", model_spec("code", replicas=3, parallelism={"tensor": 2}))
    fleet.settle()
    assert len(fleet.of("big")) == 2
    assert fleet.models[("team", "big")].status.npus == 4
    assert fleet.condition("big", "CapacityAvailable")[1] == Reason.NO_CAPACITY
    assert fleet.pool_status.allocated == 4


def test_words_of_others_do_not_outgrow_what_status_holds() -> None:
    fleet = Fleet()
    long = "x" * 5000
    fleet.add_model("tiny", model_spec(replicas=9, workload_class="code"))
    fleet.settle()
    for uid, pod in fleet.pods.items():
        fleet.pods[uid] = replace(pod, engine_ready=False, waiting_reason="ErrImagePull", waiting_message=long)
    plan = make_plan(replace(fleet.observe(), refused={("team", "tiny"): long}), fleet.now)
    status = plan.model_status[("team", "tiny")]
    assert all(len(condition.message) <= 1024 for condition in status.conditions)
    type(status).model_validate(status.model_dump())
    assert plan.pool_status is not None
    type(plan.pool_status).model_validate(plan.pool_status.model_dump())


def test_the_longest_names_fit_into_a_decision() -> None:
    name = "n" * 253
    fleet = Fleet(pool=pool_spec(classes=[{"name": "chat", "minPercent": 50}, {"name": "code"}]))
    fleet.namespaces["s" * 63] = {}
    fleet.add_model("coder", model_spec("code", 8))
    fleet.settle()
    fleet.add_model(name, model_spec("chat", 1), namespace="s" * 63)
    fleet.settle()
    assert any(name in decision.message for decision in fleet.pool_status.decisions)
    assert all(len(decision.message) <= 1024 for decision in fleet.pool_status.decisions)
