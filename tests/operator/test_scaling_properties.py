"""The pool's promises, over random pools, models, loads, failures, restarts, clocks and lies."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from npufleet_api.conditions import Reason
from npufleet_api.pool import PoolMode
from npufleet_api.report import DataState
from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import ModelKey, TrafficView
from npufleet_operator.shell.timeline import Timeline
from support.fleet import DRAIN_SECONDS, RESOURCE, Fleet, is_quiet, model_spec, node, pool_spec
from support.load import Load, elastic_spec, put_load, run

CLASSES = ("chat", "document", "code")
NAMES = ("a", "b", "c")
COOLDOWN = 60


def random_pool(shares: list[tuple[int, int]], unit: int = 1, **changes: object) -> object:
    """Three classes with a guarantee and what their ceiling lies above it."""
    classes = [
        {"name": name, "priority": 3 - index, "minPercent": low, "maxPercent": min(100, low + more)}
        for index, (name, (low, more)) in enumerate(zip(CLASSES, shares, strict=True))
    ]
    rebalancing = {"drainSeconds": DRAIN_SECONDS, "cooldownSeconds": COOLDOWN}
    return pool_spec(**{"npus": {"resourceName": RESOURCE, "unit": unit}, "classes": classes, "rebalancing": rebalancing, **changes})


SHARES = st.lists(st.tuples(st.integers(0, 33), st.sampled_from([0, 20, 50, 100])), min_size=3, max_size=3)


def assert_only_borrowers_lose(fleet: Fleet, plan: Plan, before: dict[str, int]) -> None:
    """What a class uses of its guarantee is never taken."""
    assert plan.pool_status is not None
    guaranteed = {c.name: c.guaranteed for c in plan.pool_status.classes}
    taken: dict[str, int] = {}
    gone = [(drain.pod, drain.reason) for drain in plan.drains] + [(delete.pod, delete.reason) for delete in plan.deletes]
    for pod, reason in gone:
        if reason in (Reason.RECLAIMED_FOR_GUARANTEE, Reason.WORTH_MORE_ELSEWHERE) and pod.drain_started is None:
            name = pod.labels["npufleet.dev/workload-class"]
            taken[name] = taken.get(name, 0) + pod.requests[RESOURCE]
    largest = max((pod.requests[RESOURCE] for pod in fleet.pods.values()), default=0)
    for name, npus in taken.items():
        assert before[name] > guaranteed[name], f"{name} borrows nothing"
        assert before[name] - npus > guaranteed[name] - largest, f"{name} loses what it is guaranteed"


class PoolMachine(RuleBasedStateMachine):
    """Loads come and go, cards fail, the operator restarts and is lied to; the planner steps."""

    @initialize(sizes=st.lists(st.integers(2, 8), min_size=1, max_size=3), shares=SHARES, unit=st.sampled_from([1, 1, 2]))
    def start(self, sizes: list[int], shares: list[tuple[int, int]], unit: int) -> None:
        nodes = {f"node-{i}": node(f"node-{i}", size) for i, size in enumerate(sizes)}
        pool = random_pool(shares, unit)
        self.fleet = Fleet(nodes=nodes, pool=pool, timeline=Timeline())  # type: ignore[arg-type]  # an InferencePoolSpec
        self.loads: dict[str, Load] = {}
        self.data = DataState.FRESH
        self.lies = 0
        self.moves: dict[ModelKey, tuple[float, int]] = {}
        self.drains: dict[str, float] = {}
        """When each drain began, in the fleet's uptime, by UID of the pod."""

    @rule(name=st.sampled_from(NAMES), cls=st.sampled_from(CLASSES), least=st.integers(0, 2), more=st.integers(0, 6),
          tensor=st.sampled_from([1, 1, 2, 4]))  # fmt: skip
    def apply_elastic(self, name: str, cls: str, least: int, more: int, tensor: int) -> None:
        before = self.fleet.models.get(("team", name))
        if before and before.spec:
            cls, tensor = before.spec.workload_class, before.spec.parallelism.tensor
        assert self.fleet.pool is not None
        whole = max(tensor, self.fleet.pool.npus.unit)
        self.fleet.add_model(name, elastic_spec(cls, least, max(1, least + more), parallelism={"tensor": whole}))
        self.moves.pop(("team", name), None)

    @rule(name=st.sampled_from(NAMES), replicas=st.integers(0, 6))
    def pin(self, name: str, replicas: int) -> None:
        model = self.fleet.models.get(("team", name))
        if model and model.spec:
            self.fleet.add_model(name, model.spec.model_copy(update={"replicas": replicas}))
            self.moves.pop(("team", name), None)

    @rule(name=st.sampled_from(NAMES), in_flight=st.sampled_from([0, 1, 5, 20, 60, 400]), capacity=st.sampled_from([4, 10]))
    def load(self, name: str, in_flight: int, capacity: int) -> None:
        self.loads[name] = Load(in_flight, capacity)

    @rule(data=st.sampled_from([DataState.FRESH, DataState.FRESH, DataState.PARTIAL, DataState.STALE, DataState.NO_DATA]))
    def reports(self, data: DataState) -> None:
        self.data = data

    @rule(kind=st.integers(0, 5))
    def lie(self, kind: int) -> None:
        self.lies = kind

    @rule(data=st.data(), lost=st.integers(0, 4))
    def change_cards(self, data: st.DataObject, lost: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.fleet.nodes)))
        view = self.fleet.nodes[name]
        self.fleet.nodes[name] = replace(view, allocatable={RESOURCE: max(0, view.capacity[RESOURCE] - lost)})

    @rule(data=st.data(), ready=st.booleans(), schedulable=st.booleans())
    def change_node(self, data: st.DataObject, ready: bool, schedulable: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.fleet.nodes)))
        self.fleet.nodes[name] = replace(self.fleet.nodes[name], ready=ready, schedulable=schedulable)

    @rule()
    def restart_with_what_the_cluster_knows(self) -> None:
        """Statuses are the only memory; whoever loses them as well, plans from what runs."""
        for key, model in self.fleet.models.items():
            self.fleet.models[key] = replace(model, status=type(model.status)())
        self.fleet.pool_status = type(self.fleet.pool_status)()
        self.fleet.timeline = Timeline()
        self.moves.clear()

    @rule(hours=st.sampled_from([-24, -1, 1, 24]))
    def clock_jumps(self, hours: int) -> None:
        self.fleet.now += timedelta(hours=hours)

    @rule(busy=st.booleans(), auto_ready=st.booleans())
    def engines(self, busy: bool, auto_ready: bool) -> None:
        self.fleet.busy = set(self.fleet.pods) if busy else set()
        self.fleet.auto_ready = auto_ready

    @rule(advisory=st.booleans())
    def mode(self, advisory: bool) -> None:
        assert self.fleet.pool is not None
        self.fleet.pool = self.fleet.pool.model_copy(update={"mode": PoolMode.ADVISORY if advisory else PoolMode.ACTIVE})
        self.moves.clear()

    @rule(seconds=st.sampled_from([1, 5, 15, 40, 90]))
    def step(self, seconds: float) -> None:
        fleet = self.fleet
        self._report()
        before = {cls: fleet.charged(cls) for cls in CLASSES}
        supply_used = fleet.charged_to_supply()
        base = {key: model.status.desired_replicas for key, model in fleet.models.items()}
        known = {key: model.status.observed_generation == model.generation for key, model in fleet.models.items()}
        plan = fleet.plan()
        if fleet.pool is not None and fleet.pool.mode == "Advisory":
            assert is_quiet(plan)
            assert not plan.objects
        self._only_borrowers_lose(plan, before)
        self._nothing_shrinks_blind(plan)
        self._no_drain_is_cut_short(plan)
        fleet.apply(plan)
        self._bounds_hold(plan, before, supply_used)
        self._no_flapping(plan, base, known)
        fleet.pass_time(seconds)

    def _report(self) -> None:
        put_load(self.fleet, self.loads, self.data)
        if self.data is DataState.NO_DATA:
            self.fleet.traffic = TrafficView()
            return
        (report,) = self.fleet.traffic.reports
        huge = 10**15
        models = list(report.models)
        if self.lies == 1:
            models = [m.model_copy(update={"in_flight": huge, "judged": 1, "attained": huge}) for m in models]
        elif self.lies == 2:
            models = [m.model_copy(update={"name": "nobody"}) for m in models]
        elif self.lies == 3:
            models = models * 3
        elif self.lies == 4:
            models = [m.model_copy(update={"window_seconds": 0.0, "last_request_age_seconds": 10.0**7}) for m in models]
        time_unix = 1.0 if self.lies == 5 else report.time_unix
        self.fleet.traffic = TrafficView(self.data, (report.model_copy(update={"models": models, "time_unix": time_unix}),))

    def _only_borrowers_lose(self, plan: Plan, before: dict[str, int]) -> None:
        assert_only_borrowers_lose(self.fleet, plan, before)

    def _nothing_shrinks_blind(self, plan: Plan) -> None:
        blind = self.data in (DataState.NO_DATA, DataState.STALE, DataState.PARTIAL) or self.lies in (2, 5)
        for choice in plan.choices:
            assert not (blind and choice.reason in (Reason.LOAD_FELL, Reason.IDLE)), choice

    def _no_drain_is_cut_short(self, plan: Plan) -> None:
        for delete in plan.deletes:
            if delete.reason is Reason.DRAIN_DEADLINE:
                assert self.fleet.uptime - self.drains[delete.pod.uid] >= DRAIN_SECONDS - 1, "cut short"
        gone = {cancel.pod.uid for cancel in plan.cancels}
        self.drains = {uid: begun for uid, begun in self.drains.items() if uid not in gone}
        for drain in plan.drains:
            self.drains.setdefault(drain.pod.uid, self.fleet.uptime)

    def _bounds_hold(self, plan: Plan, before: dict[str, int], supply_used: int) -> None:
        """No action takes a class over its ceiling or the pool over its supply."""
        assert plan.pool_status is not None
        assert self.fleet.pool is not None
        if plan.creates:
            assert self.fleet.charged_to_supply() <= max(supply_used, plan.pool_status.supply), "over supply"
        for workload_class in self.fleet.pool.classes:
            _, ceiling = class_bounds(workload_class, plan.pool_status.nominal)
            assert self.fleet.charged(workload_class.name) <= max(before[workload_class.name], ceiling), "over ceiling"

    def _no_flapping(self, plan: Plan, base: dict[ModelKey, int], known: dict[ModelKey, bool]) -> None:
        """No A, B, A within the cooldown, except that a request wakes what sleeps."""
        exempt = {c.model for c in plan.choices if c.reason in (Reason.WOKEN_BY_DEMAND, Reason.OUTSIDE_BOUNDS)}
        reclaimed = {c.model for c in plan.choices if c.reason is Reason.RECLAIMED_FOR_GUARANTEE}
        for key, status in plan.model_status.items():
            moved = status.desired_replicas - base[key]
            spec = self.fleet.models[key].spec
            if not moved or not known[key] or spec is None or spec.replicas is not None or self.fleet.pool.mode == "Advisory":  # type: ignore[union-attr]
                continue
            last = self.moves.get(key)
            if last and last[1] * moved < 0 and key not in exempt | reclaimed:
                assert self.fleet.uptime - last[0] >= COOLDOWN - 1, f"{key} flaps: {plan.choices}"
            self.moves[key] = (self.fleet.uptime, moved)

    @precondition(lambda self: hasattr(self, "fleet"))
    @invariant()
    def the_order_of_the_inputs_does_not_matter(self) -> None:
        plan = self.fleet.plan()
        shuffled = list(self.fleet.pods.items())
        random.Random(len(shuffled)).shuffle(shuffled)  # noqa: S311  # an order, not a secret
        self.fleet.pods = dict(shuffled)
        self.fleet.models = dict(sorted(self.fleet.models.items(), reverse=True))
        self.fleet.nodes = dict(sorted(self.fleet.nodes.items(), reverse=True))
        assert self.fleet.plan() == plan

    def teardown(self) -> None:
        """Repaired and under a constant load it comes to rest, stays there, and owes no guarantee."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.busy.clear()
        fleet.auto_ready = True
        assert fleet.pool is not None
        fleet.pool = fleet.pool.model_copy(update={"mode": PoolMode.ACTIVE})
        for name, view in fleet.nodes.items():
            fleet.nodes[name] = node(name, view.capacity[RESOURCE])
        run(fleet, self.loads, 1500, step=15)
        for plan in run(fleet, self.loads, 300, step=15):
            assert is_quiet(plan), f"not at rest: {plan.choices}"
            assert not plan.choices
        condition = fleet.pool_status.condition("GuaranteesMet")
        assert condition is not None
        assert condition.reason != Reason.GUARANTEE_WAITING, condition.message


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestPool = PoolMachine.TestCase


@given(SHARES, st.integers(4, 12), st.integers(0, 2), st.integers(1, 6), st.booleans())
@settings(max_examples=60)
def test_each_replica_of_a_guarantee_comes_within_a_bounded_time(
    shares: list[tuple[int, int]], npus: int, claimant: int, replicas: int, busy: bool
) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", npus)}, pool=random_pool(shares))  # type: ignore[arg-type]  # an InferencePoolSpec
    for index, name in enumerate(CLASSES):
        if index != claimant:
            fleet.add_model(f"m{index}", model_spec(name, npus))
    fleet.settle()
    if busy:
        fleet.busy = set(fleet.pods)
    fleet.add_model("late", model_spec(CLASSES[claimant], replicas))
    guarantee, _ = class_bounds(fleet.pool.classes[claimant], npus)  # type: ignore[union-attr]
    due = min(guarantee, replicas)
    load_seconds = 5
    for nth in range(1, due + 1):
        for _ in range(DRAIN_SECONDS + load_seconds):
            if fleet.charged(CLASSES[claimant]) >= nth:
                break
            fleet.step()
        assert fleet.charged(CLASSES[claimant]) >= nth, f"{nth} of {due} after drain and load"


@given(
    SHARES,
    st.lists(st.integers(2, 8), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=8),
    st.lists(st.sampled_from([1, 1, 2, 4]), min_size=6, max_size=6),
)
@settings(max_examples=80)
def test_whatever_is_asked_only_borrowers_lose_and_every_claim_that_fits_is_met(
    shares: list[tuple[int, int]], sizes: list[int], changes: list[tuple[int, int]], tensors: list[int]
) -> None:
    nodes = {f"node-{i}": node(f"node-{i}", size) for i, size in enumerate(sizes)}
    fleet = Fleet(nodes=nodes, pool=random_pool(shares))  # type: ignore[arg-type]  # an InferencePoolSpec
    for index, replicas in changes:
        spec = model_spec(CLASSES[index % 3], replicas, parallelism={"tensor": tensors[index]})
        fleet.add_model(f"m{index}", spec)
        for _ in range(60):
            before = {cls: fleet.charged(cls) for cls in CLASSES}
            plan = fleet.plan()
            assert_only_borrowers_lose(fleet, plan, before)
            fleet.apply(plan)
            fleet.pass_time(1)
    fleet.settle()
    condition = fleet.pool_status.condition("GuaranteesMet")
    assert condition is not None
    assert condition.reason != Reason.GUARANTEE_WAITING, condition.message


@given(SHARES, st.lists(st.tuples(st.sampled_from(CLASSES), st.sampled_from([0, 5, 30, 200])), min_size=1, max_size=4), st.integers(2, 12))
@settings(max_examples=25)
def test_a_constant_load_comes_to_rest_and_planning_again_changes_nothing(
    shares: list[tuple[int, int]], models: list[tuple[str, int]], npus: int
) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", npus)}, pool=random_pool(shares))  # type: ignore[arg-type]  # an InferencePoolSpec
    loads = {f"m{index}": Load(in_flight) for index, (_, in_flight) in enumerate(models)}
    for index, (cls, _) in enumerate(models):
        fleet.add_model(f"m{index}", elastic_spec(cls))
    run(fleet, loads, 1200, step=10)
    put_load(fleet, loads)
    first = fleet.plan()
    fleet.apply(first)
    again = fleet.plan()
    assert is_quiet(first)
    assert again == first


@pytest.mark.parametrize("mode", ["Active", "Advisory"])
def test_an_empty_pool_plans(mode: str) -> None:
    fleet = Fleet(nodes={}, pool=pool_spec(mode=mode))
    fleet.add_model("tiny", elastic_spec())
    put_load(fleet, {"tiny": Load(100)})
    assert is_quiet(fleet.step())
