"""An InferencePool's status: the ledger, conditions and the last decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from npufleet_api.conditions import PoolCondition, Reason
from npufleet_api.pool import Decision, InferencePoolStatus, Reclaim
from npufleet_operator.core.conditions import Conditions
from npufleet_operator.core.findings import Findings
from npufleet_operator.core.ledger import Ledger
from npufleet_operator.core.model_plan import HOLDS
from npufleet_operator.core.observed import GatewayView, ModelKey, PoolView

MAX_DECISIONS = 20
NAMED = 5
"""Nodes or models that a message names; the rest is counted."""


UNPLANNED = (
    PoolCondition.CAPACITY,
    PoolCondition.GATEWAY,
    PoolCondition.GUARANTEES,
    PoolCondition.NODES,
    PoolCondition.NOT_YET_EFFECTIVE,
)


def pool_status(
    pool: PoolView, findings: Findings | None, models: int, gateway: GatewayView, endpoint: str, fresh: Sequence[Decision], now: datetime
) -> InferencePoolStatus:
    """The whole status; `fresh` are the decisions of this plan."""
    conditions = Conditions(pool.status.conditions, pool.generation, now)
    if findings is None or pool.spec is None:
        conditions.set(PoolCondition.ACCEPTED, False, Reason.SPEC_REFUSED, pool.spec_error)
        for kind in UNPLANNED:
            conditions.set(kind, None, Reason.PENDING, "not planned: the spec cannot be used; what runs is kept as it is")
        conditions.set(PoolCondition.READY, False, Reason.SPEC_REFUSED, pool.spec_error)
        return pool.status.model_copy(update={"observed_generation": pool.generation, "conditions": conditions.result()})
    conditions.set(PoolCondition.ACCEPTED, True, Reason.ACCEPTED, f"mode {pool.spec.mode.value}")
    ledger = findings.ledger
    capacity_reason = _capacity(conditions, pool, ledger)
    _gateway(conditions, gateway)
    _guarantees(conditions, findings, pool.spec.rebalancing.reclaim)
    _nodes(conditions, findings)
    conditions.set(PoolCondition.NOT_YET_EFFECTIVE, False, Reason.ALL_EFFECTIVE, "every field that is set has its effect")
    _ready(conditions, ledger, gateway, capacity_reason)
    return InferencePoolStatus(
        observed_generation=pool.generation,
        nominal=ledger.capacity.nominal,
        supply=ledger.capacity.supply,
        foreign=ledger.capacity.foreign,
        allocated=ledger.allocated,
        draining=ledger.draining,
        models=models,
        endpoint=endpoint,
        classes=list(ledger.classes),
        decisions=_remembered(pool.status.decisions, fresh),
        conditions=conditions.result(),
    )


def _capacity(conditions: Conditions, pool: PoolView, ledger: Ledger) -> Reason:
    c = ledger.capacity
    resource = pool.spec.npus.resource_name if pool.spec else ""
    if c.nominal == 0:
        reason, message = (
            Reason.NO_NODES,
            f"spec.npus: no node has {resource} and matches nodeSelector; check the device plugin, resourceName and the labels",
        )
    elif c.unhealthy:
        lost = ", ".join(f"{count} on {node}" for node, count in sorted(c.unhealthy.items()))
        reason = Reason.NPU_UNHEALTHY
        message = (
            f"{sum(c.unhealthy.values())} of {c.nominal} NPUs are not allocatable ({lost}); "
            "see npu-smi info and the device plugin's log there"
        )
    elif ledger.allocated > c.supply:
        reason, message = (
            Reason.NO_CAPACITY,
            f"{ledger.allocated} NPUs are charged, {c.supply} are there: nodes out of service: {', '.join(c.out) or 'none'}",
        )
    else:
        message = f"{c.supply} of {c.nominal} NPUs can be used, {ledger.allocated} are charged"
        conditions.set(PoolCondition.CAPACITY, True, Reason.AS_EXPECTED, message)
        return Reason.AS_EXPECTED
    conditions.set(PoolCondition.CAPACITY, False, reason, message)
    return reason


def _remembered(before: Sequence[Decision], fresh: Sequence[Decision]) -> list[Decision]:
    """The last decisions. What was held back says nothing any more once the same model has something newer: it makes room for moves."""
    newer = {decision.model for decision in fresh}
    kept = [d for d in before if not (d.reason in HOLDS and d.model in newer)]
    return [*kept, *fresh][-MAX_DECISIONS:]


def _guarantees(conditions: Conditions, f: Findings, reclaim: Reclaim) -> None:
    """The most pressing of what keeps a class from its guarantee."""
    promised = sum(account.nominal_guarantee for account in f.accounts.values())
    shrunk = [a for a in f.accounts.values() if a.guarantee < a.nominal_guarantee]
    allocation = f.allocation
    if shrunk:
        left = ", ".join(f"{a.name} {a.guarantee} of {a.nominal_guarantee}" for a in sorted(shrunk, key=lambda a: a.name))
        reason = Reason.GUARANTEES_EXCEED_SUPPLY
        message = (
            f"{promised} NPUs are guaranteed, {f.ledger.capacity.supply} can be used: by priority, these shrink: {left}; "
            "bring cards or nodes back, or lower minPercent"
        )
    elif allocation.fragmented:
        reason = Reason.GUARANTEE_FRAGMENTED
        message = (
            f"NPUs for the guarantee of {_claimants(allocation.fragmented, f.classes)} are there in sum, but not on one node; "
            "drain a node of the others' replicas, or lower parallelism"
        )
    elif allocation.waiting or allocation.denied:
        reason = Reason.GUARANTEE_WAITING
        who = _claimants(allocation.waiting | allocation.denied, f.classes)
        if allocation.waiting:
            message = f"NPUs for the guarantee of {who} are on their way: replicas of others leave"
        elif reclaim is Reclaim.NEVER:
            message = (
                f"{who} waits for its guarantee, and rebalancing.reclaim is Never; set it to BorrowedOnly to take back what is borrowed"
            )
        else:
            message = f"{who} waits for its guarantee, and nothing is borrowed: NPUs are held by models that are not accepted, or are gone"
    elif f.too_large:
        reason = Reason.GUARANTEE_BELOW_REPLICA
        some = sorted(f.too_large.items())
        named = ", ".join(f"{'/'.join(key)} ({npus} NPUs, class {f.classes[key]!r})" for key, npus in some[:NAMED])
        message = f"the guarantee of the class holds no replica of {named}{_rest(some)}: raise minPercent, or lower parallelism"
    else:
        message = f"{promised} NPUs are guaranteed, and no class waits for its own"
        conditions.set(PoolCondition.GUARANTEES, True, Reason.AS_EXPECTED, message)
        return
    conditions.set(PoolCondition.GUARANTEES, False, reason, message)


def _claimants(models: Iterable[ModelKey], classes: Mapping[ModelKey, str]) -> str:
    found = sorted(models)
    return ", ".join(f"{'/'.join(key)} (class {classes[key]!r})" for key in found[:NAMED]) + _rest(found)


def _rest(found: Sequence[object]) -> str:
    return f" and {len(found) - NAMED} more" if len(found) > NAMED else ""


def _nodes(conditions: Conditions, f: Findings) -> None:
    lost, contested = sorted(f.sharing.lost.items()), sorted(f.sharing.contested.items())
    if not lost and not contested:
        conditions.set(PoolCondition.NODES, True, Reason.AS_EXPECTED, "no other pool selects a node of this one")
        return
    parts = []
    if lost:
        names = ", ".join(f"{node} (to {pool})" for node, pool in lost[:NAMED])
        parts.append(f"{len(lost)} node(s) belong to pools that were created earlier: {names}{_rest(lost)}")
    if contested:
        names = ", ".join(f"{node} (by {pool})" for node, pool in contested[:NAMED])
        parts.append(f"{len(contested)} node(s) of this pool are selected by others too: {names}{_rest(contested)}")
    conditions.set(PoolCondition.NODES, False, Reason.NODES_SHARED, f"{'; '.join(parts)}; make npus.nodeSelector narrower")


def _gateway(conditions: Conditions, gateway: GatewayView) -> None:
    if gateway.external:
        message = "mode External: the site's inference gateway serves; npufleet sees no traffic and changes no number of replicas by it"
        conditions.set(PoolCondition.GATEWAY, True, Reason.GATEWAY_EXTERNAL, message)
    elif gateway.ready_replicas and gateway.route_kind_missing:
        message = "spec.gateway.httpRoute: the cluster has no HTTPRoute; install the Gateway API's CRDs (v1)"
        conditions.set(PoolCondition.GATEWAY, True, Reason.ROUTE_KIND_MISSING, message)
    elif gateway.ready_replicas:
        conditions.set(PoolCondition.GATEWAY, True, Reason.GATEWAY_READY, f"{gateway.ready_replicas} gateway replica(s) serve")
    else:
        conditions.set(PoolCondition.GATEWAY, False, Reason.GATEWAY_UNAVAILABLE, "no gateway replica is ready; see its Deployment and pods")


def _ready(conditions: Conditions, ledger: Ledger, gateway: GatewayView, capacity_reason: Reason) -> None:
    if ledger.capacity.nominal == 0:
        conditions.set(PoolCondition.READY, False, Reason.NO_NODES, "the pool has no NPUs")
    elif not gateway.ready_replicas and not gateway.external:
        conditions.set(PoolCondition.READY, False, Reason.GATEWAY_UNAVAILABLE, "no gateway replica is ready")
    elif capacity_reason is not Reason.AS_EXPECTED:
        conditions.set(PoolCondition.READY, True, Reason.DEGRADED, f"serving with less than nominal: {capacity_reason.value}")
    else:
        conditions.set(PoolCondition.READY, True, Reason.READY, "serving")
