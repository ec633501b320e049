"""What holds for every pool, every history and every failure."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from npufleet_api.conditions import Reason
from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.actions import Plan
from support.fleet import RESOURCE, Fleet, is_quiet, model_spec, node, pool_spec

CLASSES = ("chat", "document", "code")


class FleetMachine(RuleBasedStateMachine):
    """Models come, change and go; cards, nodes and pods fail; engines hang; the planner steps."""

    @initialize(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3), unit=st.sampled_from([1, 2]))
    def start(self, sizes: list[int], unit: int) -> None:
        nodes = {f"node-{i}": node(f"node-{i}", size) for i, size in enumerate(sizes)}
        self.fleet = Fleet(nodes=nodes, pool=pool_spec(npus={"resourceName": RESOURCE, "unit": unit}))
        self.restricted: set[str] = set()

    @rule(name=st.sampled_from(["a", "b", "c"]), cls=st.sampled_from(CLASSES), replicas=st.integers(0, 5), batch=st.integers(1, 3),
          tensor=st.sampled_from([1, 1, 2, 4]), rollout=st.sampled_from(["RollingUpdate", "Recreate"]))  # fmt: skip
    def apply_model(self, name: str, cls: str, replicas: int, batch: int, tensor: int, rollout: str) -> None:
        before = self.fleet.models.get(("team", name))
        if before and before.spec:
            cls = before.spec.workload_class
        assert self.fleet.pool is not None
        tensor = max(tensor, self.fleet.pool.npus.unit)
        self.fleet.add_model(
            name, model_spec(cls, replicas, engine={"maxNumSequences": batch}, parallelism={"tensor": tensor}, rollout=rollout)
        )

    @rule(data=st.data(), batch=st.integers(4, 6))
    def roll_out(self, data: st.DataObject, batch: int) -> None:
        if not self.fleet.models:
            return
        _, name = data.draw(st.sampled_from(sorted(self.fleet.models)))
        spec = self.fleet.models[("team", name)].spec
        assert spec is not None
        engine = spec.engine.model_copy(update={"max_num_sequences": batch})
        self.fleet.add_model(name, spec.model_copy(update={"engine": engine}))
        self.step(0.5)

    @rule(name=st.sampled_from(["a", "b", "c"]))
    def delete_model(self, name: str) -> None:
        gone = self.fleet.models.pop(("team", name), None)
        if gone:
            self.fleet.pods = {
                uid: replace(pod, terminating=True, engine_ready=False) if pod.owner_uid == gone.uid else pod
                for uid, pod in self.fleet.pods.items()
            }
            self.fleet.owners = {o: owner for o, owner in self.fleet.owners.items() if owner != gone.uid}

    @rule(data=st.data(), lost=st.integers(0, 4))
    def change_cards(self, data: st.DataObject, lost: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.fleet.nodes)))
        view = self.fleet.nodes[name]
        self.fleet.nodes[name] = replace(view, allocatable={RESOURCE: max(0, view.capacity[RESOURCE] - lost)})

    @rule(data=st.data(), ready=st.booleans(), schedulable=st.booleans())
    def change_node(self, data: st.DataObject, ready: bool, schedulable: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.fleet.nodes)))
        self.fleet.nodes[name] = replace(self.fleet.nodes[name], ready=ready, schedulable=schedulable)

    @rule(data=st.data(), how=st.sampled_from(["fail", "delete", "unready", "busy", "vanish"]))
    def disturb_pod(self, data: st.DataObject, how: str) -> None:
        if not self.fleet.pods:
            return
        uid = data.draw(st.sampled_from(sorted(self.fleet.pods)))
        pod = self.fleet.pods[uid]
        if how == "fail":
            self.fleet.pods[uid] = replace(pod, phase="Failed", engine_ready=False, engine_started=False)
        elif how == "delete":
            self.fleet.pods[uid] = replace(pod, terminating=True, engine_ready=False)
        elif how == "unready":
            self.fleet.pods[uid] = replace(pod, engine_ready=False)
        elif how == "busy":
            self.fleet.busy.add(uid)
        else:
            del self.fleet.pods[uid]

    @rule(seconds=st.sampled_from([0.5, 1, 5, 30, 90]))
    def step(self, seconds: float) -> None:
        fleet = self.fleet
        before = {cls: fleet.charged(cls) for cls in CLASSES}
        total = fleet.charged_to_supply()
        ready = {model.uid: sum(p.engine_ready for p in fleet.pods.values() if p.owner_uid == model.uid) for model in fleet.models.values()}
        plan = fleet.plan()
        fleet.apply(plan)
        self._bounds_hold(plan, before, total)
        self._rollouts_keep_serving(plan, ready)
        fleet.pass_time(seconds)

    def _bounds_hold(self, plan: Plan, before: dict[str, int], total: int) -> None:
        """No action takes a class over its ceiling or the pool over its supply."""
        assert plan.pool_status is not None
        if plan.creates:
            assert self.fleet.charged_to_supply() <= max(total, plan.pool_status.supply), "over supply"
        pool = self.fleet.pool
        assert pool is not None
        for workload_class in pool.classes:
            _, ceiling = class_bounds(workload_class, plan.pool_status.nominal)
            assert self.fleet.charged(workload_class.name) <= max(before[workload_class.name], ceiling), "over ceiling"

    def _rollouts_keep_serving(self, plan: Plan, ready: dict[str, int]) -> None:
        """A rollout never takes the last serving replica away, unless Recreate is chosen. A claim to a guarantee may, of a borrower."""
        for model in self.fleet.models.values():
            assert model.spec is not None
            if model.spec.rollout == "Recreate" or model.spec.replicas == 0 or not ready[model.uid]:
                continue
            taken = [(step.pod, step.reason) for step in plan.drains] + [(step.pod, step.reason) for step in plan.deletes]
            lost = {
                pod.uid
                for pod, reason in taken
                if pod.owner_uid == model.uid and pod.engine_ready and reason is not Reason.RECLAIMED_FOR_GUARANTEE
            }
            assert len(lost) < ready[model.uid], f"{model.name} loses its last serving replica"

    @invariant()
    def planning_is_deterministic_and_independent_of_order(self) -> None:
        if not hasattr(self, "fleet"):
            return
        observed = self.fleet.observe()
        shuffled = list(observed.pods)
        random.Random(len(shuffled)).shuffle(shuffled)  # noqa: S311  # an order, not a secret
        plan = self.fleet.plan()
        self.fleet.pods = {pod.uid: pod for pod in shuffled}
        self.fleet.models = dict(sorted(self.fleet.models.items(), reverse=True))
        self.fleet.nodes = dict(sorted(self.fleet.nodes.items(), reverse=True))
        assert self.fleet.plan() == plan

    @invariant()
    def names_are_never_taken_twice(self) -> None:
        if not hasattr(self, "fleet"):
            return
        names = [create.manifest["metadata"]["name"] for create in self.fleet.plan().creates]
        assert len(names) == len(set(names))
        assert not set(names) & {pod.name for pod in self.fleet.pods.values()}

    @invariant()
    def conditions_are_complete(self) -> None:
        if not hasattr(self, "fleet"):
            return
        plan = self.fleet.plan()
        for status in plan.model_status.values():
            assert [c.type for c in status.conditions] == [
                "Accepted", "CapacityAvailable", "Available", "RolledOut", "Routed", "RevisionPinned", "NotYetEffective", "Ready",
            ]  # fmt: skip
            assert all(condition.message for condition in status.conditions)
        assert plan.pool_status is not None
        assert len(plan.pool_status.decisions) <= 20

    def teardown(self) -> None:
        """Once everything is repaired and left alone, it comes to rest, and planning again changes nothing."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.busy.clear()
        for name, view in fleet.nodes.items():
            fleet.nodes[name] = node(name, view.capacity[RESOURCE])
        fleet.settle()
        plan = fleet.plan()
        assert is_quiet(plan)
        fleet.apply(plan)
        again = fleet.plan()
        assert again == plan
        for model in fleet.models.values():
            assert model.status.condition("RolledOut").status in ("True", "False")  # type: ignore[union-attr]
            wanted = min(model.spec.replicas or 0, 99) if model.spec else 0
            assert len(fleet.of(model.name)) <= wanted


FleetMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestFleet = FleetMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(0, 6)), min_size=1, max_size=6), st.integers(1, 16))
def test_an_applied_plan_plans_nothing_more(models: list[tuple[str, int]], npus: int) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", npus)})
    for index, (cls, replicas) in enumerate(models):
        fleet.add_model(f"m{index}", model_spec(cls, replicas))
    fleet.settle()
    first = fleet.plan()
    fleet.apply(first)
    assert fleet.plan() == first
    assert is_quiet(first)


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.integers(1, 6)), min_size=1, max_size=6), st.integers(4, 16))
def test_a_class_with_demand_gets_its_guarantee(models: list[tuple[str, int]], npus: int) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", npus)})
    for index, (cls, replicas) in enumerate(models):
        fleet.add_model(f"m{index}", model_spec(cls, replicas))
    fleet.settle()
    assert fleet.pool is not None
    for workload_class in fleet.pool.classes:
        guarantee, _ = class_bounds(workload_class, npus)
        demand = sum(replicas for cls, replicas in models if cls == workload_class.name)
        assert fleet.charged(workload_class.name) >= min(guarantee, demand)


@given(st.integers(0, 3))
def test_manifests_are_plain_json(seed: int) -> None:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec(replicas=seed + 1))
    plan = fleet.plan()
    for manifest in (*plan.objects, *(create.manifest for create in plan.creates)):
        assert json.loads(json.dumps(manifest)) == manifest
