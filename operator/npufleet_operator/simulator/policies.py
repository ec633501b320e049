"""Who decides how many replicas each model has: npufleet's planner, HPA, KPA, or nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Protocol

from npufleet_api.conditions import ConditionStatus, ModelCondition
from npufleet_api.contract import CLASS_LABEL
from npufleet_api.model import AscendModelStatus
from npufleet_api.pool import InferencePoolStatus
from npufleet_api.report import DataState
from npufleet_operator.core.observed import GatewayView, ModelKey, ModelView, Observed, OperatorConfig, PodView, PoolView, TrafficView
from npufleet_operator.core.plan import make_plan
from npufleet_operator.simulator.allocations import Allocation, replica_bounds
from npufleet_operator.simulator.autoscalers import HPA_SYNC_SECONDS, KPA_TICK_SECONDS, Hpa, Kpa
from npufleet_operator.simulator.cluster import EPOCH, SimulatedCluster
from npufleet_operator.simulator.constants import AUTOSCALER_TARGET_SHARE, REPORT_SECONDS
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.gateway import SimulatedGateway
from npufleet_operator.simulator.scenario import Scenario, SimulatedModel

SETTLE_SECONDS = 0.05
"""Changes come in bursts; one plan serves a burst, as in the operator."""
CONFIG = OperatorConfig(namespace="npufleet-system", engine_image="simulated", control_image="simulated")


@dataclass(frozen=True, slots=True)
class Stage:
    """What a policy acts on."""

    scenario: Scenario
    clock: Clock
    cluster: SimulatedCluster
    gateway: SimulatedGateway


@dataclass(slots=True)
class Tally:
    """What a policy did."""

    started: int = 0
    retired: int = 0
    reclaims: int = 0


class Policy(Protocol):
    """Started before time 0 with the replicas that shall be there at time 0; set free at time 0."""

    tally: Tally

    def start(self, stage: Stage, split: Allocation) -> None:
        """Bring up `split`."""

    def release(self) -> None:
        """From now on decide."""

    def trouble(self) -> str:
        """Why replicas of the split do not serve, as far as the policy knows."""


class Npufleet:
    """The operator's planner, woken as the operator is: by changes, and by the plan's own timer."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._wanted_at = float("inf")
        self._traffic = TrafficView()
        self._fetched = float("-inf")

    def start(self, stage: Stage, split: Allocation) -> None:
        """Pin every model to its part of the split."""
        self._stage = stage
        self._pool = PoolView(stage.scenario.pool_name, "pool", 1, stage.scenario.pool, "", InferencePoolStatus())
        self._models = {
            model.key: _view(model, index, {**_local(model), "replicas": split[model.key]})
            for index, model in enumerate(stage.scenario.models)
        }
        stage.cluster.changed = lambda: self._wake(SETTLE_SECONDS)
        self._wake(0)

    def release(self) -> None:
        """Unpin."""
        self.tally = Tally()
        for model in self._stage.scenario.models:
            spec = type(model.spec).model_validate(_local(model))
            self._models[model.key] = replace(self._models[model.key], spec=spec, generation=2)
        self._wake(0)

    def trouble(self) -> str:
        """What the models' conditions say."""
        conditions = [(key, model.status.condition(ModelCondition.READY)) for key, model in self._models.items()]
        return "; ".join(f"{'/'.join(key)}: {c.message}" for key, c in conditions if c is not None and c.status is not ConditionStatus.TRUE)

    def _wake(self, seconds: float) -> None:
        at = self._stage.clock.now + seconds
        if at < self._wanted_at:
            self._wanted_at = at
            self._stage.clock.at(at, lambda: self._plan(at))

    def _plan(self, at: float) -> None:
        if at != self._wanted_at:
            return
        self._wanted_at = float("inf")
        plan = make_plan(self.observe(), self._stage.cluster.now())
        self.tally.started += len(plan.creates)
        self.tally.retired += sum(drain.pod.drain_started is None for drain in plan.drains)
        self.tally.retired += sum(delete.pod.drain_started is None for delete in plan.deletes)
        self.tally.reclaims += sum(
            drain.pod.drain_started is None and drain.reason.value == "ReclaimedForGuarantee" for drain in plan.drains
        )
        self._stage.cluster.apply(plan)
        for key, status in plan.model_status.items():
            self._models[key] = replace(self._models[key], status=status)
        if plan.pool_status:
            self._pool = replace(self._pool, status=plan.pool_status)
        self._wake(plan.wake_after_seconds)

    def observe(self) -> Observed:
        """What the planner sees now."""
        stage = self._stage
        cluster = stage.cluster
        if stage.clock.now - self._fetched >= REPORT_SECONDS:
            self._fetched = stage.clock.now
            report = stage.gateway.report(list(cluster.pods.values()), cluster.replicas, cluster.load_seconds)
            self._traffic = TrafficView(DataState.FRESH, (report,))
        return Observed(
            pool_name=stage.scenario.pool_name,
            pool=self._pool,
            models=tuple(self._models.values()),
            pods=tuple(cluster.pods.values()),
            nodes=tuple(cluster.nodes.values()),
            namespaces={model.namespace: {"kubernetes.io/metadata.name": model.namespace} for model in stage.scenario.models},
            probes=cluster.probes(),
            traffic=self._traffic,
            gateway=GatewayView(exists=True, ready_replicas=1),
            config=CONFIG,
        )


class Deployments:
    """Replicas as Deployments have them: created when wanted, bound when there is room, the newest ended first; no classes, no
    guarantees."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._names = 0

    def start(self, stage: Stage, split: Allocation) -> None:
        """Create the split's replicas."""
        self._stage = stage
        stage.cluster.changed = self._sweep
        for model in stage.scenario.models:
            self.scale(model, split[model.key])

    def release(self) -> None:
        """Nobody decides."""
        self.tally = Tally()

    def trouble(self) -> str:
        """Pods that have no room wait, and say no more."""
        return "no room on a node"

    def live(self, model: ModelKey) -> list[PodView]:
        """Replicas that serve or will."""
        return [pod for pod in self._stage.cluster.of(model) if pod.drain_started is None]

    def scale(self, model: SimulatedModel, desired: int) -> None:
        """Create or end replicas."""
        live = self.live(model.key)
        for _ in range(desired - len(live)):
            self._names += 1
            labels = {CLASS_LABEL: model.spec.workload_class}
            requests = {self._stage.cluster.resource: model.npus}
            self._stage.cluster.create(model.key, f"{model.name}-{self._names}", labels, "", requests)
            self.tally.started += 1
        # As a ReplicaSet does: unbound first, then unready, then the newest.
        order = sorted(live, key=lambda pod: (bool(pod.node), pod.engine_ready, -pod.created.timestamp(), pod.name))
        for pod in order[: max(0, len(live) - desired)]:
            self.tally.retired += 1
            if not pod.engine_started:
                self._stage.cluster.delete(pod.uid)
                continue
            self._stage.cluster.drain(pod.uid, self._stage.cluster.now(), "ScaledDown")
            drain_seconds = self._stage.scenario.pool.rebalancing.drain_seconds
            self._stage.clock.after(drain_seconds, partial(self._stage.cluster.delete, pod.uid))
        self._sweep()

    def _sweep(self) -> None:
        """Drained replicas end: SIGTERM lets a replica finish what it runs."""
        for uid, replica in list(self._stage.cluster.replicas.items()):
            if replica.draining and not replica.outstanding:
                self._stage.cluster.delete(uid)


class HpaPolicy(Deployments):
    """A HorizontalPodAutoscaler per model, on requests in flight per replica."""

    def release(self) -> None:
        """Sync every 15 s."""
        super().release()
        scenario = self._stage.scenario
        self._scalers = {m.key: Hpa(*_bounds(scenario, m), AUTOSCALER_TARGET_SHARE * m.concurrency) for m in scenario.models}
        self._sync()

    def _sync(self) -> None:
        for model in self._stage.scenario.models:
            live = self.live(model.key)
            metrics = [float(self._stage.cluster.replicas[pod.uid].outstanding) for pod in live if pod.engine_ready]
            desired = self._scalers[model.key].decide(self._stage.clock.now, len(live), metrics, len(live) - len(metrics))
            self.scale(model, desired)
        self._stage.clock.after(HPA_SYNC_SECONDS, self._sync)


class KpaPolicy(Deployments):
    """A PodAutoscaler of Knative per model, on its requests in flight."""

    def release(self) -> None:
        """Tick every 2 s."""
        super().release()
        scenario = self._stage.scenario
        self._scalers = {m.key: Kpa(*_bounds(scenario, m), AUTOSCALER_TARGET_SHARE * m.concurrency) for m in scenario.models}
        self._tick()

    def _tick(self) -> None:
        for model in self._stage.scenario.models:
            ready = sum(pod.engine_ready for pod in self.live(model.key))
            in_flight = float(self._stage.gateway.in_flight(model.key))
            self.scale(model, self._scalers[model.key].decide(self._stage.clock.now, in_flight, ready))
        self._stage.clock.after(KPA_TICK_SECONDS, self._tick)


def _bounds(scenario: Scenario, model: SimulatedModel) -> tuple[int, int]:
    low, high = replica_bounds(scenario, model)
    return max(1, low), max(1, high)


def _local(model: SimulatedModel) -> dict[str, object]:
    """The spec, with its weights on a volume: where they come from is not simulated, and not every source is served yet."""
    raw = model.spec.model_dump(exclude_unset=True)
    return {**raw, "model": {"uri": "pvc://simulated", "served_name": model.spec.model.served_name}}


def _view(model: SimulatedModel, index: int, raw: Mapping[str, object]) -> ModelView:
    return ModelView(
        namespace=model.namespace,
        name=model.name,
        uid=f"model-{model.namespace}-{model.name}",
        generation=1,
        created=EPOCH - timedelta(days=1) + timedelta(seconds=index),
        pool_name=model.spec.pool_ref.name,
        spec=type(model.spec).model_validate(raw),
        spec_error="",
        status=AscendModelStatus(),
    )
