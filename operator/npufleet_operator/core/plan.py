"""`make_plan`: from one observation of a pool to everything that shall be done about it.

Pure, deterministic, independent of the order of its inputs, and idempotent: planning over an applied plan changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from npufleet_api.conditions import Reason
from npufleet_api.contract import POOL_LABEL
from npufleet_api.pool import Decision, GatewayMode, InferencePoolSpec, PoolMode
from npufleet_operator.core import ledger as books
from npufleet_operator.core.acceptance import judge, names_taken
from npufleet_operator.core.actions import Choice, Plan
from npufleet_operator.core.conditions import timestamp
from npufleet_operator.core.measured import Measured
from npufleet_operator.core.model_plan import ModelPlan
from npufleet_operator.core.model_status import Outcome, model_status
from npufleet_operator.core.multi_model import MultiModelScheduler, Schedule, pods_by_model
from npufleet_operator.core.naming import slug
from npufleet_operator.core.objects.common import Manifest
from npufleet_operator.core.objects.gateway import build_gateway_deployment, build_gateway_service, gateway_endpoint
from npufleet_operator.core.objects.http_route import HTTP_ROUTE_KIND, build_http_route
from npufleet_operator.core.observed import NodeView, Observed, OperatorConfig, PodView, PoolView
from npufleet_operator.core.pool_status import pool_status
from npufleet_operator.core.replicas import sort_replicas

DRAIN_POLL_SECONDS = 1.0
WAKE_UP_SECONDS = 2.0
"""How soon the demand of a model without replicas is seen."""
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
    schedule = MultiModelScheduler(observed, observed.pool, observed.pool.spec, nodes, now).schedule()
    return _assemble(observed, observed.pool, observed.pool.spec, schedule, now)


def _seen_from_node(pod: PodView, nodes: Mapping[str, NodeView]) -> PodView:
    """A lost node's kubelet no longer says that its containers are not ready."""
    if not pod.engine_ready or not pod.node:
        return pod
    node = nodes.get(pod.node)
    return replace(pod, engine_ready=False) if node is None or not node.ready else pod


def _assemble(o: Observed, pool: PoolView, spec: InferencePoolSpec, schedule: Schedule, now: datetime) -> Plan:
    advisory = spec.mode is PoolMode.ADVISORY
    decided = schedule.plans
    choices = _unsaid(pool, decided, advisory)
    decisions = [Decision(time=timestamp(now), model="/".join(c.model), reason=c.reason, message=c.message) for c in choices]
    last = {choice.model: decision for choice, decision in zip(choices, decisions, strict=True)}
    scaled = {choice.model for choice in choices if not advisory and choice.reason in (Reason.SCALED_UP, Reason.SCALED_DOWN)}
    keepers = names_taken(o.models)
    external = spec.gateway.mode is GatewayMode.EXTERNAL
    endpoint = "" if external else gateway_endpoint(o.pool_name, o.config.namespace, spec)
    resource = spec.npus.resource_name
    statuses = {
        plan.model.key: model_status(
            Outcome(
                model=plan.model,
                replicas=plan.situation.replicas,
                desired=plan.desired,
                npus_charged=books.charged_npus(resource, schedule.pods.get(plan.model.key, ())),
                refusal=plan.refusal,
                plan=plan.design.blueprint if plan.design else None,
                short=plan.short,
                waits_for_spare=plan.waits_for_spare,
                preloading=plan.preloading,
                endpoint=endpoint,
                name_keeper=keepers.get(plan.model.served_name),
                create_refused=o.refused.get(plan.model.key, ""),
                decision=last.get(plan.model.key),
                fetches=o.fetches,
                scaled=plan.model.key in scaled,
                target=plan.target,
                advisory=advisory,
            ),
            schedule.measured,
            now,
        )
        for plan in decided
    }
    route_missing = spec.gateway.http_route is not None and HTTP_ROUTE_KIND not in o.config.optional_kinds
    gateway = replace(o.gateway, external=external, route_kind_missing=route_missing and not external)
    status = pool_status(pool, schedule.findings, len(o.models), gateway, endpoint, decisions, now)
    if advisory:
        return Plan(choices=tuple(choices), model_status=statuses, pool_status=status, wake_after_seconds=spec.rebalancing.interval_seconds)
    drains = tuple(drain for plan in decided for drain in plan.steps.drains)
    moving = bool(drains) or any(plan.situation.replicas.draining for plan in decided)
    asleep = any(plan.target.elastic and plan.refusal is None and plan.desired == 0 for plan in decided)
    accepted = [plan for plan in decided if plan.refusal is None]
    return Plan(
        objects=(
            *_gateway_objects(o.pool_name, spec, o.config),
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
        prune_gateway=True,
        wake_after_seconds=min(
            float(spec.rebalancing.interval_seconds),
            DRAIN_POLL_SECONDS if moving else float(spec.rebalancing.interval_seconds),
            WAKE_UP_SECONDS if asleep else float(spec.rebalancing.interval_seconds),
        ),
    )


def _gateway_objects(pool: str, spec: InferencePoolSpec, config: OperatorConfig) -> tuple[Manifest, ...]:
    if spec.gateway.mode is GatewayMode.EXTERNAL:
        return ()
    route = build_http_route(pool, spec, config)
    return (
        build_gateway_service(pool, spec, config),
        build_gateway_deployment(pool, spec, config),
        *((route,) if route is not None else ()),
    )


def _unsaid(pool: PoolView, plans: Sequence[ModelPlan], advisory: bool) -> list[Choice]:
    """Decisions to publish. What is decided again and again without being done is said once, whatever figures come with it: clamps,
    until the model has another decision, and advice, until it is another number of replicas."""
    last = {d.model: d.reason for d in pool.status.decisions}
    said = {(d.model, d.reason) for d in pool.status.decisions}
    choices = []
    for plan in plans:
        name = "/".join(plan.model.key)
        same_advice = advisory and plan.desired == plan.model.status.desired_replicas
        for choice in plan.choices:
            repeated = choice.reason in REPEATED and last.get(name) == choice.reason
            if not repeated and not (same_advice and (name, choice.reason.value) in said):
                choices.append(choice)
    return choices


def _keep_everything(o: Observed, nodes: Mapping[str, NodeView], now: datetime) -> Plan:
    """No pool, or none that can be used: what runs is kept, and the conditions say why nothing changes."""
    statuses = {}
    endpoint = gateway_endpoint(o.pool_name, o.config.namespace, o.pool.spec if o.pool is not None else None)
    keepers = names_taken(o.models)
    serving = any(pod.labels.get(POOL_LABEL) == slug(o.pool_name) and pod.owner_name and not pod.finished for pod in o.pods)
    measured, owned = Measured(o.traffic, now), pods_by_model(o)
    for model in o.models:
        pods = owned.get(model.key, [])
        statuses[model.key] = model_status(
            Outcome(
                model=model,
                replicas=sort_replicas(pods, model.status.revision, nodes),
                desired=model.status.desired_replicas,
                npus_charged=model.status.npus if pods else 0,
                refusal=judge(model, o.pool, o.namespaces, o.config),
                endpoint=(model.status.endpoint or endpoint) if serving else "",
                name_keeper=keepers.get(model.served_name),
            ),
            measured,
            now,
        )
    status = pool_status(o.pool, None, len(o.models), o.gateway, endpoint, [], now) if o.pool else None
    return Plan(
        model_status=statuses,
        pool_status=status,
        prune_gateway=o.pool is None and not serving,
        wake_after_seconds=IDLE_WAKE_SECONDS,
    )
