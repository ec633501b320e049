"""`make_plan`: from one observation of a pool to everything that shall be done about it.

Pure, deterministic, independent of the order of its inputs, and idempotent: planning over an applied plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from npufleet_api.conditions import Reason
from npufleet_api.contract import POOL_LABEL
from npufleet_api.model import Rollout
from npufleet_api.pool import Decision, InferencePoolSpec, PoolMode
from npufleet_operator.core import ledger as books
from npufleet_operator.core.acceptance import Refusal, judge, names_taken
from npufleet_operator.core.actions import Choice, Plan
from npufleet_operator.core.allocation import Want, allocate
from npufleet_operator.core.capacity import Capacity, Room, capacity
from npufleet_operator.core.conditions import timestamp
from npufleet_operator.core.measured import in_flight_by_pod
from npufleet_operator.core.model_plan import ModelPlan, decide, propose, shortage
from npufleet_operator.core.model_status import Outcome, model_status
from npufleet_operator.core.naming import slug
from npufleet_operator.core.objects.gateway import build_gateway_deployment, build_gateway_service, gateway_endpoint
from npufleet_operator.core.objects.pod import blueprint
from npufleet_operator.core.observed import ModelKey, ModelView, NodeView, Observed, PodView, PoolView
from npufleet_operator.core.pool_status import pool_status
from npufleet_operator.core.replicas import Situation, sort_replicas

DRAIN_POLL_SECONDS = 1.0
IDLE_WAKE_SECONDS = 15.0
REPEATED = frozenset({Reason.CLAMPED_BY_CAPACITY, Reason.CLAMPED_BY_CEILING})


def make_plan(observed: Observed, now: datetime) -> Plan:
    """The plan for one pool and all models that refer to it."""
    nodes = {node.name: node for node in observed.nodes}
    observed = replace(
        observed,
        models=tuple(sorted(observed.models, key=lambda m: m.key)),
        pods=tuple(sorted((_seen_from_node(pod, nodes) for pod in observed.pods), key=lambda p: p.key)),
    )
    if observed.pool is None or observed.pool.spec is None:
        return _keep_everything(observed, nodes, now)
    return _plan_pool(observed, observed.pool, observed.pool.spec, nodes, now)


def _seen_from_node(pod: PodView, nodes: Mapping[str, NodeView]) -> PodView:
    """A lost node's kubelet no longer says that its containers are not ready."""
    node = nodes.get(pod.node)
    return replace(pod, engine_ready=False) if pod.node and (node is None or not node.ready) and pod.engine_ready else pod


def _plan_pool(o: Observed, pool: PoolView, spec: InferencePoolSpec, nodes: Mapping[str, NodeView], now: datetime) -> Plan:
    by_uid = {model.uid: model for model in o.models}
    room_before = capacity(spec, o.pool_name, o.nodes, o.pods, by_uid)
    accounts = books.accounts(spec, o.pool_name, room_before.nominal, o.pods, by_uid)
    load = in_flight_by_pod(o.traffic)
    proposals = {model.key: _propose(o, spec, model, nodes, load, now) for model in o.models}
    wants = [
        Want(
            model=p.model.key,
            created=p.model.created,
            workload_class=p.spec.workload_class,
            npus=p.spec.parallelism.npus,
            held=len(p.situation.replicas.live),
            missing=p.steps.missing,
            surge=p.steps.surge,
        )
        for p in proposals.values()
        if p.spec is not None and p.refusal is None
    ]
    grants = allocate(wants, accounts, Room(room_before.free, spec.npus.unit, room_before.headroom))
    taken = {(pod.namespace, pod.name) for pod in o.pods}
    decided: list[ModelPlan] = []
    shortages: dict[ModelKey, Refusal] = {}
    for key, proposal in proposals.items():
        grant = grants.get(key)
        if grant is None or proposal.spec is None:
            decided.append(proposal)
            continue
        short = shortage(proposal, grant, accounts[proposal.spec.workload_class], room_before)
        if short:
            shortages[key] = short
        decided.append(decide(proposal, grant, short, taken, load))
    return _assemble(o, pool, spec, room_before, decided, shortages, now)


def _propose(
    o: Observed, spec: InferencePoolSpec, model: ModelView, nodes: Mapping[str, NodeView], load: Mapping[str, int], now: datetime
) -> ModelPlan:
    refusal = judge(model, o.pool, o.namespaces, o.config)
    design = blueprint(model, model.spec, spec, o.config) if model.spec and not refusal else None
    revision = design.revision if design else model.status.revision
    pods = _pods_of(model, o.pods)
    situation = Situation(
        replicas=sort_replicas(pods, revision, nodes),
        desired=_desired(model) if not refusal else model.status.desired_replicas,
        rollout=model.spec.rollout if model.spec else Rollout.ROLLING_UPDATE,
        revision=revision,
        nodes=nodes,
        probes=o.probes,
        load=load,
        now=now,
        drain_seconds=spec.rebalancing.drain_seconds,
    )
    return propose(model, situation, design, refusal, spec, o.config)


def _pods_of(model: ModelView, pods: Sequence[PodView]) -> list[PodView]:
    """An owner reference does not cross namespaces: a pod that claims another namespace's model is not the model's."""
    return [pod for pod in pods if pod.owner_uid == model.uid and pod.namespace == model.namespace]


def _desired(model: ModelView) -> int:
    if model.spec is None:
        return 0
    return model.spec.replicas if model.spec.replicas is not None else model.spec.scaling.min_replicas


def _assemble(
    o: Observed,
    pool: PoolView,
    spec: InferencePoolSpec,
    room: Capacity,
    decided: list[ModelPlan],
    shortages: Mapping[ModelKey, Refusal],
    now: datetime,
) -> Plan:
    advisory = spec.mode is PoolMode.ADVISORY
    choices = _unsaid(pool, [choice for plan in decided for choice in plan.choices], advisory)
    decisions = [Decision(time=timestamp(now), model="/".join(c.model), reason=c.reason, message=c.message) for c in choices]
    last = {choice.model: decision for choice, decision in zip(choices, decisions, strict=True)}
    keepers = names_taken(o.models)
    by_uid = {model.uid: model for model in o.models}
    endpoint = gateway_endpoint(o.pool_name, o.config.namespace)
    resource = spec.npus.resource_name
    statuses = {
        plan.model.key: model_status(
            Outcome(
                model=plan.model,
                replicas=plan.situation.replicas,
                desired=plan.situation.desired,
                npus_charged=books.charged_npus(resource, _pods_of(plan.model, o.pods)),
                refusal=plan.refusal,
                plan=plan.design,
                short=shortages.get(plan.model.key),
                waits_for_spare=plan.waits_for_spare,
                endpoint=endpoint,
                name_keeper=keepers.get(plan.model.served_name),
                create_refused=o.refused.get(plan.model.key, ""),
                decision=last.get(plan.model.key),
            ),
            o.traffic,
            now,
        )
        for plan in decided
    }
    ledger = books.ledger(spec, o.pool_name, room, o.pods, by_uid)
    status = pool_status(pool, ledger, len(o.models), o.gateway, endpoint, decisions, now)
    if advisory:
        return Plan(choices=tuple(choices), model_status=statuses, pool_status=status, wake_after_seconds=spec.rebalancing.interval_seconds)
    drains = tuple(drain for plan in decided for drain in plan.steps.drains)
    moving = bool(drains) or any(plan.situation.replicas.draining for plan in decided)
    accepted = [plan for plan in decided if plan.refusal is None]
    return Plan(
        objects=(
            build_gateway_service(o.pool_name, o.config),
            build_gateway_deployment(o.pool_name, spec, o.config),
            *(manifest for plan in accepted for manifest in plan.objects),
        ),
        creates=tuple(create for plan in decided for create in plan.creates),
        drains=drains,
        cancels=tuple(cancel for plan in decided for cancel in plan.steps.cancels),
        deletes=tuple(delete for plan in decided for delete in plan.steps.deletes),
        choices=tuple(choices),
        model_status=statuses,
        pool_status=status,
        keep=frozenset(kept for plan in accepted for kept in plan.keep),
        prune_owners=frozenset(plan.model.uid for plan in accepted),
        wake_after_seconds=DRAIN_POLL_SECONDS if moving else float(spec.rebalancing.interval_seconds),
    )


def _unsaid(pool: PoolView, choices: list[Choice], advisory: bool) -> list[Choice]:
    """Decisions to publish. What is decided again and again without being done (clamps, and all of Advisory) is said once."""
    said = {d.model: (d.reason, d.message) for d in pool.status.decisions}
    return [c for c in choices if not ((advisory or c.reason in REPEATED) and said.get("/".join(c.model)) == (c.reason.value, c.message))]


def _keep_everything(o: Observed, nodes: Mapping[str, NodeView], now: datetime) -> Plan:
    """No pool, or none that can be used: what runs is kept, and the conditions say why nothing changes."""
    statuses = {}
    endpoint = gateway_endpoint(o.pool_name, o.config.namespace)
    keepers = names_taken(o.models)
    serving = any(pod.labels.get(POOL_LABEL) == slug(o.pool_name) and pod.owner_name and not pod.finished for pod in o.pods)
    for model in o.models:
        pods = _pods_of(model, o.pods)
        statuses[model.key] = model_status(
            Outcome(
                model=model,
                replicas=sort_replicas(pods, model.status.revision, nodes),
                desired=model.status.desired_replicas,
                npus_charged=model.status.npus if pods else 0,
                refusal=judge(model, o.pool, o.namespaces, o.config),
                endpoint=endpoint if serving else "",
                name_keeper=keepers.get(model.served_name),
            ),
            o.traffic,
            now,
        )
    status = pool_status(o.pool, None, len(o.models), o.gateway, endpoint, [], now) if o.pool else None
    return Plan(
        model_status=statuses,
        pool_status=status,
        prune_gateway=o.pool is None and not serving,
        wake_after_seconds=IDLE_WAKE_SECONDS,
    )
