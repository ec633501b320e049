"""`MultiModelScheduler`: all models of one pool at once: what each wants, who is granted what, and from whom it is taken back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from npufleet_api.model import AscendModelSpec, Rollout
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.acceptance import judge
from npufleet_operator.core.allocation import Allocation, ClassAccount, DynamicResourceAllocator, Holding, Victim, Want
from npufleet_operator.core.autoscale.scaler import scale
from npufleet_operator.core.capacity import capacity, sharing
from npufleet_operator.core.designs import design
from npufleet_operator.core.findings import Findings
from npufleet_operator.core.ledger import Books
from npufleet_operator.core.measured import Measured
from npufleet_operator.core.model_plan import ModelPlan, decide, propose, shortage, successor_fits
from npufleet_operator.core.observed import ModelKey, ModelView, NodeView, Observed, PodView, PoolView, RivalPool
from npufleet_operator.core.preloading import NONE as NOTHING_TO_PRELOAD
from npufleet_operator.core.preloading import preloading
from npufleet_operator.core.replicas import Situation, sort_replicas
from npufleet_operator.core.room import Room


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is decided for every model of the pool."""

    plans: tuple[ModelPlan, ...]
    pods: Mapping[ModelKey, list[PodView]]
    measured: Measured
    findings: Findings


def pods_by_model(o: Observed) -> dict[ModelKey, list[PodView]]:
    """Pods of each model. An owner reference does not cross namespaces: a pod that claims another namespace's model is not the model's."""
    owners = {model.uid: model for model in o.models}
    owned: dict[ModelKey, list[PodView]] = {}
    for pod in o.pods:
        model = owners.get(pod.owner_uid)
        if model is not None and model.namespace == pod.namespace:
            owned.setdefault(model.key, []).append(pod)
    return owned


class MultiModelScheduler:
    """One plan of one pool. `observed` is sorted by name already."""

    def __init__(self, observed: Observed, pool: PoolView, spec: InferencePoolSpec, nodes: Mapping[str, NodeView], now: datetime) -> None:
        self._o = observed
        self._pool = pool
        self._spec = spec
        self._nodes = nodes
        self._now = now
        self._by_uid = {model.uid: model for model in observed.models}
        self._pods = pods_by_model(observed)
        self._measured = Measured(observed.traffic, now)
        self._sharing = sharing(RivalPool(pool.name, pool.created, spec.npus), observed.nodes, observed.rivals)
        own = [node for node in observed.nodes if node.name not in self._sharing.lost]
        self._capacity = capacity(spec, observed.pool_name, own, observed.pods, self._by_uid)

    def schedule(self) -> Schedule:
        """Propose for each model, allocate over all, decide for each."""
        books = Books(self._spec, self._o.pool_name, self._capacity, self._o.pods, self._by_uid)
        accounts = books.accounts()
        proposals = [self._propose(model, accounts) for model in self._o.models]
        planned = [p for p in proposals if p.spec is not None and p.design is not None]
        allocation = self._allocate(planned, accounts)
        plans = self._decide(proposals, allocation, accounts)
        wanted: dict[str, int] = {}
        for plan in planned:
            if plan.spec is not None:
                wanted[plan.spec.workload_class] = wanted.get(plan.spec.workload_class, 0) + plan.target.wanted * plan.spec.parallelism.npus
        findings = Findings(
            ledger=books.ledger(accounts, wanted),
            accounts=accounts,
            allocation=allocation,
            sharing=self._sharing,
            too_large={
                plan.model.key: plan.spec.parallelism.npus
                for plan in planned
                if plan.spec and 0 < accounts[plan.spec.workload_class].nominal_guarantee < plan.spec.parallelism.npus
            },
            classes={plan.model.key: plan.spec.workload_class for plan in planned if plan.spec},
        )
        return Schedule(tuple(plans), self._pods, self._measured, findings)

    def _propose(self, model: ModelView, accounts: Mapping[str, ClassAccount]) -> ModelPlan:
        o, spec = self._o, self._spec
        refusal = judge(model, o.pool, o.namespaces, o.config)
        made = design(model, model.spec, o.pool_name, spec, o.config) if model.spec and not refusal else None
        revision = made.blueprint.revision if made else model.status.revision
        replicas = sort_replicas(self._pods.get(model.key, []), revision, self._nodes)
        target = scale(model, spec, replicas, self._measured, self._now, refused=refusal is not None)
        situation = Situation(
            replicas=replicas,
            desired=target.wanted,
            rollout=model.spec.rollout if model.spec else Rollout.ROLLING_UPDATE,
            revision=revision,
            nodes=self._nodes,
            probes=o.probes,
            load=self._measured.in_flight,
            now=self._now,
            drain_seconds=spec.rebalancing.drain_seconds,
            successor_fits=made is None
            or model.spec is None
            or successor_fits(model, replicas, spec.npus.resource_name, accounts[model.spec.workload_class], self._capacity),
        )
        preload = (
            preloading(model, model.spec, spec, o.config, made, replicas, o.jobs, self._nodes)
            if made and model.spec
            else NOTHING_TO_PRELOAD
        )
        return propose(model, situation, target, made, refusal, preload)

    def _allocate(self, planned: list[ModelPlan], accounts: Mapping[str, ClassAccount]) -> Allocation:
        room = Room(self._capacity, self._spec.npus.unit)
        wants, holdings, losses = [], [], {}
        for plan in planned:
            model_spec = plan.spec
            if model_spec is None:
                continue
            going = {drain.pod.uid for drain in plan.steps.drains} | {delete.pod.uid for delete in plan.steps.deletes}
            wants.append(
                Want(
                    model=plan.model.key,
                    created=plan.model.created,
                    workload_class=model_spec.workload_class,
                    npus=model_spec.parallelism.npus,
                    held=len(plan.situation.replicas.live),
                    missing=plan.steps.missing,
                    surge=plan.steps.surge,
                    worth=plan.target.worth if len(plan.situation.replicas.live) >= plan.target.least else None,
                    settled=plan.target.settled,
                )
            )
            if plan.target.worth is not None and plan.target.rests:
                losses[plan.model.key] = plan.target.worth.loss
            for pod in plan.situation.replicas.live:
                if pod.uid in going:
                    room.expect(self._place(pod), self._charge(pod))
                else:
                    holdings.append(self._holding(plan.model, model_spec, pod))
            for cancel in plan.steps.cancels:
                room.expect(self._place(cancel.pod), -self._charge(cancel.pod))
        return DynamicResourceAllocator(accounts, room, holdings, self._spec.rebalancing, losses).allocate(wants)

    def _holding(self, model: ModelView, spec: AscendModelSpec, pod: PodView) -> Holding:
        load = self._measured.in_flight.get(pod.uid, 0)
        return Holding(model.key, pod, spec.workload_class, self._charge(pod), self._place(pod), load)

    def _charge(self, pod: PodView) -> int:
        return pod.requests.get(self._spec.npus.resource_name, 0)

    def _place(self, pod: PodView) -> str:
        return pod.node or self._capacity.reserved.get(pod.uid, "")

    def _decide(self, proposals: list[ModelPlan], allocation: Allocation, accounts: Mapping[str, ClassAccount]) -> list[ModelPlan]:
        taken = {(pod.namespace, pod.name) for pod in self._o.pods}
        victims: dict[ModelKey, list[Victim]] = {}
        for victim in allocation.victims:
            victims.setdefault(victim.holding.model, []).append(victim)
        plans = []
        for proposal in proposals:
            grant = allocation.grants.get(proposal.model.key)
            if grant is None or proposal.spec is None:
                plans.append(proposal)
                continue
            short = shortage(proposal, grant, accounts[proposal.spec.workload_class], self._capacity)
            mine = victims.get(proposal.model.key, [])
            plans.append(decide(proposal, grant, short, mine, taken, unclaimed=not allocation.claims))
        return plans
