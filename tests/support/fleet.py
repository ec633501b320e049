"""A pure stand-in for a cluster: it holds models, nodes and pods as the planner sees them, carries plans out, and lets time pass.

It does what a kubelet, a scheduler and an engine would do, without any of them: for tests of the planner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from npufleet_api.contract import EngineState
from npufleet_api.model import AscendModelSpec, AscendModelStatus
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus
from npufleet_operator.core.actions import Plan, object_id
from npufleet_operator.core.observed import (
    EngineProbe,
    GatewayView,
    ModelView,
    NodeView,
    Observed,
    OperatorConfig,
    PodView,
    PoolView,
    RivalPool,
    TrafficView,
)
from npufleet_operator.core.plan import make_plan
from npufleet_operator.shell.parse import pod_requests
from npufleet_operator.shell.timeline import Timeline

RESOURCE = "huawei.com/Ascend910"
START = datetime(2026, 1, 1, tzinfo=UTC)
CONFIG = OperatorConfig(namespace="npufleet-system", engine_image="engine:1", control_image="control:1")
DRAIN_SECONDS = 60


def pool_spec(**changes: Any) -> InferencePoolSpec:
    """A pool of three classes."""
    raw: dict[str, Any] = {
        "npus": {"resourceName": RESOURCE},
        "classes": [
            {"name": "chat", "priority": 3, "minPercent": 20, "maxPercent": 50},
            {"name": "document", "priority": 2, "minPercent": 30, "maxPercent": 60},
            {"name": "code", "priority": 1, "minPercent": 10, "maxPercent": 100},
        ],
        "rebalancing": {"drainSeconds": DRAIN_SECONDS},
    }
    return InferencePoolSpec.model_validate({**raw, **changes})


def model_spec(workload_class: str = "chat", replicas: int | None = 1, **changes: Any) -> AscendModelSpec:
    """A model on a volume."""
    raw: dict[str, Any] = {
        "poolRef": {"name": "prod"},
        "workloadClass": workload_class,
        "model": {"uri": "pvc://weights/tiny"},
        "replicas": replicas,
    }
    return AscendModelSpec.model_validate({**raw, **changes})


def node(name: str, npus: int = 8, **changes: Any) -> NodeView:
    """A healthy node."""
    view = NodeView(name, {"chip": "910B3"}, ready=True, schedulable=True, capacity={RESOURCE: npus}, allocatable={RESOURCE: npus})
    return replace(view, **changes)


@dataclass
class Fleet:
    """Mutable on purpose: a test changes it, and plans change it."""

    pool: InferencePoolSpec | None = field(default_factory=pool_spec)
    nodes: dict[str, NodeView] = field(default_factory=lambda: {"node-0": node("node-0")})
    models: dict[tuple[str, str], ModelView] = field(default_factory=dict)
    pods: dict[str, PodView] = field(default_factory=dict)
    probes: dict[str, EngineProbe] = field(default_factory=dict)
    owners: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """UID of the owning model of each object that was applied; empty for the gateway's."""
    now: datetime = START
    pool_status: InferencePoolStatus = field(default_factory=InferencePoolStatus)
    namespaces: dict[str, Mapping[str, str]] = field(default_factory=lambda: {"team": {"kubernetes.io/metadata.name": "team"}})
    config: OperatorConfig = CONFIG
    auto_ready: bool = True
    busy: set[str] = field(default_factory=set)
    """UIDs of replicas whose requests do not end."""
    created: int = 0
    preferred: dict[str, str] = field(default_factory=dict)
    """Node that a pod prefers, by UID."""
    traffic: TrafficView = field(default_factory=TrafficView)
    rivals: tuple[RivalPool, ...] = ()
    uptime: float = 0.0
    """Seconds that passed, whatever the clock `now` says."""
    timeline: Timeline | None = None
    """What the operator knows of time; None: the planner alone, which has nothing but `now`."""
    deadlines: dict[str, float] = field(default_factory=dict)
    """When each engine ends its drain, in `uptime`, by UID of the pod: the earliest that it was told."""

    def add_model(self, name: str, spec: AscendModelSpec, namespace: str = "team") -> None:
        """Apply an AscendModel, or change it."""
        before = self.models.get((namespace, name))
        self.models[(namespace, name)] = ModelView(
            namespace=namespace,
            name=name,
            uid=f"model-{namespace}-{name}",
            generation=before.generation + 1 if before else 1,
            created=before.created if before else self.now + timedelta(seconds=len(self.models)),
            pool_name=spec.pool_ref.name,
            spec=spec,
            spec_error="",
            status=before.status if before else AscendModelStatus(),
        )

    @property
    def objects(self) -> set[tuple[str, str, str]]:
        """Kind, namespace and name of every object that was applied and not pruned."""
        return set(self.owners)

    def observe(self) -> Observed:
        """What the planner would see now."""
        pool = None
        if self.pool is not None:
            pool = PoolView("prod", "pool-uid", 1, self.pool, "", self.pool_status)
        observed = Observed(
            pool_name="prod",
            pool=pool,
            models=tuple(self.models.values()),
            pods=tuple(self.pods.values()),
            nodes=tuple(self.nodes.values()),
            namespaces=self.namespaces,
            probes={uid: self._probe(uid, probe) for uid, probe in self.probes.items()},
            traffic=self.traffic,
            gateway=GatewayView(exists=True, ready_replicas=1),
            config=self.config,
            rivals=self.rivals,
        )
        return self.timeline.present(observed, self.now, self.uptime) if self.timeline else observed

    def _probe(self, uid: str, probe: EngineProbe) -> EngineProbe:
        due = self.deadlines.get(uid)
        return probe if due is None or probe.state is None else replace(probe, left_seconds=max(0.0, due - self.uptime))

    def plan(self) -> Plan:
        """Plan without doing anything."""
        return make_plan(self.observe(), self.now)

    def step(self, seconds: float = 1.0) -> Plan:
        """Plan, carry the plan out, and let `seconds` pass."""
        plan = self.plan()
        self.apply(plan)
        self.pass_time(seconds)
        return plan

    def settle(self, limit: int = 300) -> int:
        """Step until a plan asks for nothing more; returns the steps that it took. Fails when it does not come to rest."""
        return self.settle_with(lambda: None, limit)

    def settle_with(self, before_each: Callable[[], None], limit: int = 300) -> int:
        """The same, with something that happens before each step."""
        still = 0
        for taken in range(limit):
            before_each()
            still = still + 1 if is_quiet(self.step()) and not any(self._moves(pod) for pod in self.pods.values()) else 0
            if still == 3:
                return taken
        raise AssertionError(f"not at rest after {limit} steps: {self.plan()}")

    def _moves(self, pod: PodView) -> bool:
        coming = self.auto_ready and bool(pod.node) and not pod.engine_ready and not pod.finished and bool(pod.owner_name)
        return pod.terminating or pod.drain_started is not None or coming

    def apply(self, plan: Plan) -> None:
        """Do what the operator's hands would do."""
        for key, status in plan.model_status.items():
            self.models[key] = replace(self.models[key], status=status)
        if plan.pool_status:
            self.pool_status = plan.pool_status
        named = {object_id(m): (m["metadata"].get("ownerReferences") or [{"uid": ""}])[0]["uid"] for m in plan.objects}
        gone = plan.prune_owners | ({""} if plan.prune_gateway else set())
        pruned = {o for o, owner in self.owners.items() if owner in gone and o not in named and o not in plan.keep}
        self.owners = {o: owner for o, owner in {**self.owners, **named}.items() if o not in pruned}
        for cancel in plan.cancels:
            self.pods[cancel.pod.uid] = replace(self.pods[cancel.pod.uid], drain_started=None, drain_reason="")
            self.probes.pop(cancel.pod.uid, None)
            self.deadlines.pop(cancel.pod.uid, None)
        for drain in plan.drains:
            pod = self.pods[drain.pod.uid]
            self.pods[pod.uid] = replace(pod, drain_started=drain.since, drain_reason=drain.reason.value, engine_ready=False)
            state = EngineState.DRAINING if pod.uid in self.busy else EngineState.IDLE
            self.probes[pod.uid] = EngineProbe(state, running=int(pod.uid in self.busy))
            due = self.uptime + drain.deadline_seconds
            self.deadlines[pod.uid] = min(due, self.deadlines.get(pod.uid, due))
        for delete in plan.deletes:
            self.pods[delete.pod.uid] = replace(self.pods[delete.pod.uid], terminating=True, engine_ready=False)
        for create in plan.creates:
            self._create(create.manifest)

    def pass_time(self, seconds: float) -> None:
        """Terminating pods end, pending pods are bound where there is room, and bound pods become ready."""
        self.now += timedelta(seconds=seconds)
        self.uptime += seconds
        self.pods = {uid: pod for uid, pod in self.pods.items() if not pod.terminating}
        for uid, pod in sorted(self.pods.items()):
            if not pod.node:
                self.pods[uid] = replace(pod, node=self._place(pod))
            elif self.auto_ready and not pod.engine_ready and pod.drain_started is None and not pod.finished:
                self.pods[uid] = replace(pod, engine_ready=True, engine_started=True, phase="Running", ready_since=self.now)

    def charged(self, workload_class: str | None = None) -> int:
        """NPUs that pods hold, of one class or of all."""
        return sum(
            pod.requests.get(RESOURCE, 0)
            for pod in self.pods.values()
            if not pod.finished and (workload_class is None or pod.labels.get("npufleet.dev/workload-class") == workload_class)
        )

    def charged_to_supply(self) -> int:
        """NPUs held on usable nodes or not placed yet; what a lost node holds is not taken from the supply."""
        usable = {name for name, view in self.nodes.items() if view.ready and view.schedulable}
        return sum(pod.requests[RESOURCE] for pod in self.pods.values() if not pod.finished and (pod.node in usable or not pod.node))

    def of(self, name: str, namespace: str = "team") -> list[PodView]:
        """Pods of one model, by name."""
        return sorted((p for p in self.pods.values() if p.owner_uid == f"model-{namespace}-{name}"), key=lambda p: p.name)

    def condition(self, name: str, kind: str, namespace: str = "team") -> tuple[str, str, str]:
        """Status, reason and message of one condition of a model."""
        found = self.models[(namespace, name)].status.condition(kind)
        assert found is not None, f"{name} has no condition {kind}"
        return found.status.value, found.reason, found.message

    def _create(self, manifest: Mapping[str, Any]) -> None:
        metadata = manifest["metadata"]
        owner = metadata["ownerReferences"][0]
        assert all((p.namespace, p.name) != (metadata["namespace"], metadata["name"]) for p in self.pods.values()), "name is taken"
        self.created += 1
        uid = f"pod-{self.created:04d}"
        preference = manifest["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["preference"]
        self.preferred[uid] = preference["matchFields"][0]["values"][0]
        self.pods[uid] = PodView(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=uid,
            created=self.now,
            labels=metadata["labels"],
            owner_uid=owner["uid"],
            owner_name=owner["name"],
            node="",
            phase="Pending",
            requests=pod_requests(manifest["spec"]),
            ip=f"10.0.0.{self.created}",
        )

    def _place(self, pod: PodView) -> str:
        want = pod.requests.get(RESOURCE, 0)
        for name, view in sorted(self.nodes.items(), key=lambda n: (n[0] != self.preferred.get(pod.uid), n[0])):
            used = sum(p.requests.get(RESOURCE, 0) for p in self.pods.values() if p.node == name and not p.finished)
            if view.ready and view.schedulable and view.allocatable.get(RESOURCE, 0) - used >= want:
                return name
        return ""


def is_quiet(plan: Plan) -> bool:
    """Whether a plan moves no pod."""
    return not (plan.creates or plan.drains or plan.cancels or plan.deletes)
