"""The simulated cluster: nodes, pods that load, drain and end, as the planner sees them; it carries plans out.

A kubelet, a scheduler and an engine in one: pods are bound where their NPUs fit (best fit by free NPUs), engines start, load for as long
as their weights take to read, and take requests until they drain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from npufleet_api.contract import CLASS_LABEL, EngineState
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import EngineProbe, ModelKey, NodeView, PodView
from npufleet_operator.simulator.constants import CHIP_LABEL, POD_START_SECONDS, POD_STOP_SECONDS
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.gateway import SimulatedGateway
from npufleet_operator.simulator.replica import Replica
from npufleet_operator.simulator.scenario import Scenario, SimulatedModel

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""Wall-clock time of simulated second 0."""


class SimulatedCluster:
    """Pods by UID. `changed` is called when a pod or node changes by itself: what a watch would deliver."""

    def __init__(self, clock: Clock, scenario: Scenario, gateway: SimulatedGateway) -> None:
        self._clock = clock
        self._gateway = gateway
        self._models: Mapping[ModelKey, SimulatedModel] = {model.key: model for model in scenario.models}
        resource = scenario.pool.npus.resource_name
        labels = {**scenario.pool.npus.node_selector, CHIP_LABEL: scenario.models[0].roofline.device.name}
        npus = {resource: scenario.npus_per_node}
        self.resource = resource
        self._drain_seconds = scenario.pool.rebalancing.drain_seconds
        self.nodes = {
            name: NodeView(name, labels, ready=True, schedulable=True, capacity=npus, allocatable=npus)
            for name in (f"node-{i}" for i in range(scenario.nodes))
        }
        self.pods: dict[str, PodView] = {}
        self.replicas: dict[str, Replica] = {}
        self.changed: Callable[[], None] = lambda: None
        self._loaded: dict[str, float] = {}
        self._names: set[tuple[str, str]] = set()
        self._created = 0

    def now(self) -> datetime:
        """Simulated wall-clock time."""
        return EPOCH + timedelta(seconds=self._clock.now)

    def load_seconds(self, uid: str) -> float | None:
        """How long a replica took to load; None while it does."""
        return self._loaded.get(uid)

    def create(self, model: ModelKey, name: str, labels: Mapping[str, str], owner_uid: str, requests: Mapping[str, int]) -> str:
        """A pod of a model; its UID. It is bound at once if there is room, else when there is."""
        if (model[0], name) in self._names:
            raise AssertionError(f"pod {model[0]}/{name} exists already")
        self._names.add((model[0], name))
        self._created += 1
        uid = f"pod-{self._created:05d}"
        self.pods[uid] = PodView(
            namespace=model[0], name=name, uid=uid, created=self.now(), labels=labels, owner_uid=owner_uid, owner_name=model[1],
            node="", phase="Pending", requests=requests, ip=f"10.0.{self._created // 250 % 250}.{self._created % 250 + 1}",
        )  # fmt: skip
        self._clock.after(0, self._schedule)
        return uid

    def drain(self, uid: str, since: datetime, reason: str) -> None:
        """A replica takes no new work and finishes what it has."""
        pod = self.pods[uid]
        self.pods[uid] = replace(pod, drain_started=since, drain_reason=reason, engine_ready=False)
        self._gateway.unready((pod.namespace, pod.owner_name), uid)
        if uid in self.replicas:
            self.replicas[uid].draining = True
            self._clock.after(self._drain_seconds / 2, partial(self._hand_back, uid, since))

    def _hand_back(self, uid: str, since: datetime) -> None:
        """As the engine does in the middle of its drain."""
        pod = self.pods.get(uid)
        if pod is not None and pod.drain_started == since and uid in self.replicas:
            self.replicas[uid].hand_back()

    def cancel_drain(self, uid: str) -> None:
        """A draining replica takes work again."""
        pod = self.pods[uid]
        self.pods[uid] = replace(pod, drain_started=None, drain_reason="")
        if uid in self.replicas:
            self.replicas[uid].draining = False
            if uid in self._loaded:
                self._serve(uid)

    def delete(self, uid: str) -> None:
        """A pod goes: what it still runs ends, and its NPUs are free a moment later."""
        pod = self.pods.get(uid)
        if pod is None or pod.terminating:
            return
        self.pods[uid] = replace(pod, terminating=True, engine_ready=False)
        self._gateway.unready((pod.namespace, pod.owner_name), uid)
        if uid in self.replicas:
            self.replicas[uid].stop()
        self._clock.after(POD_STOP_SECONDS, lambda: self._gone(uid))

    def fail_cards(self, node: str, cards: int) -> None:
        """Cards of a node fail: allocatable falls. Replicas that no card is left for end, the newest first."""
        view = self.nodes[node]
        left = max(0, view.allocatable[self.resource] - cards)
        self.nodes[node] = replace(view, allocatable={**view.allocatable, self.resource: left})
        held = sorted((p for p in self.pods.values() if p.node == node and not p.finished), key=lambda p: (p.created, p.name))
        while held and sum(self._npus(pod) for pod in held) > left:
            pod = held.pop()
            self._gateway.unready((pod.namespace, pod.owner_name), pod.uid)
            self.pods[pod.uid] = replace(pod, phase="Failed", engine_ready=False, engine_started=False)
            if pod.uid in self.replicas:
                self.replicas.pop(pod.uid).stop()
        self.changed()

    def apply(self, plan: Plan) -> None:
        """Do what the operator's hands would do."""
        for cancel in plan.cancels:
            self.cancel_drain(cancel.pod.uid)
        for drain in plan.drains:
            self.drain(drain.pod.uid, drain.since, drain.reason.value)
        for delete in plan.deletes:
            self.delete(delete.pod.uid)
        for create in plan.creates:
            metadata: Mapping[str, Any] = create.manifest["metadata"]
            owner = metadata["ownerReferences"][0]
            model = self._models[create.model]
            self.create(create.model, metadata["name"], metadata["labels"], owner["uid"], {self.resource: model.npus})

    def probes(self) -> dict[str, EngineProbe]:
        """What the admin ports of draining replicas answer."""
        found = {}
        for uid, pod in self.pods.items():
            replica = self.replicas.get(uid)
            if pod.drain_started is None or pod.terminating or replica is None:
                continue
            state = EngineState.LOADING if uid not in self._loaded else EngineState.DRAINING if replica.outstanding else EngineState.IDLE
            found[uid] = EngineProbe(state, running=replica.running, waiting=replica.waiting)
        return found

    def charged(self, workload_class: str | None = None, *, ready: bool = False) -> int:
        """NPUs that pods hold, of one class or of all; with `ready`, only those of replicas that take requests."""
        return sum(
            self._npus(pod)
            for pod in self.pods.values()
            if not pod.finished
            and (workload_class is None or pod.labels.get(CLASS_LABEL) == workload_class)
            and (pod.engine_ready if ready else bool(pod.node))
        )

    def of(self, model: ModelKey) -> list[PodView]:
        """A model's pods that are not ending, oldest first."""
        found = [p for p in self.pods.values() if (p.namespace, p.owner_name) == model and not p.terminating and not p.finished]
        return sorted(found, key=lambda p: (p.created, p.name))

    def _npus(self, pod: PodView) -> int:
        return pod.requests.get(self.resource, 0)

    def _schedule(self) -> None:
        """Bind pending pods in the order of their creation."""
        pending = sorted(uid for uid, pod in self.pods.items() if not (pod.node or pod.terminating or pod.finished))
        if not pending:
            return
        free = {name: view.allocatable.get(self.resource, 0) for name, view in self.nodes.items() if view.ready and view.schedulable}
        for pod in self.pods.values():
            if pod.node in free and not pod.finished:
                free[pod.node] -= self._npus(pod)
        for uid in pending:
            pod = self.pods[uid]
            node = min(((left, name) for name, left in free.items() if left >= self._npus(pod)), default=(0, ""))[1]
            if node:
                free[node] -= self._npus(pod)
                self.pods[uid] = replace(pod, node=node)
                self._clock.after(POD_START_SECONDS, partial(self._start, uid))

    def _start(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is None or pod.terminating or pod.finished:
            return
        model = self._models[(pod.namespace, pod.owner_name)]
        self.pods[uid] = replace(pod, engine_started=True, phase="Running")
        self.replicas[uid] = Replica(self._clock, model.roofline, model.limits, self.changed_if_draining(uid))
        self._clock.after(model.roofline.load_seconds, lambda: self._ready(uid))
        self.changed()

    def changed_if_draining(self, uid: str) -> Callable[[], None]:
        """What a replica calls when it has nothing to do: only a drain waits for that."""

        def idle() -> None:
            pod = self.pods.get(uid)
            if pod is not None and pod.drain_started is not None:
                self.changed()

        return idle

    def _ready(self, uid: str) -> None:
        pod = self.pods.get(uid)
        if pod is None or pod.terminating or pod.finished:
            return
        self._loaded[uid] = self._models[(pod.namespace, pod.owner_name)].roofline.load_seconds
        if pod.drain_started is None:
            self._serve(uid)
        self.changed()

    def _serve(self, uid: str) -> None:
        pod = self.pods[uid]
        self.pods[uid] = replace(pod, engine_ready=True)
        self._gateway.ready((pod.namespace, pod.owner_name), uid, self.replicas[uid])

    def _gone(self, uid: str) -> None:
        pod = self.pods.pop(uid)
        self._names.discard(pod.key)
        self.replicas.pop(uid, None)
        self._gateway.forget((pod.namespace, pod.owner_name), uid)
        self._schedule()
        self.changed()
