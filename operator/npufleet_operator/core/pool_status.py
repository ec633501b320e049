"""An InferencePool's status: the ledger, conditions and the last decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from npufleet_api.conditions import PoolCondition, Reason
from npufleet_api.pool import ClassLedger, Decision, InferencePoolStatus
from npufleet_operator.core.acceptance import pool_fields_without_effect
from npufleet_operator.core.capacity import Capacity
from npufleet_operator.core.conditions import Conditions
from npufleet_operator.core.observed import GatewayView, PoolView

MAX_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class Ledger:
    """NPUs of the pool and of each class."""

    capacity: Capacity
    classes: tuple[ClassLedger, ...]
    allocated: int
    """NPUs charged to the pool's models, of whatever class."""
    draining: int


def pool_status(
    pool: PoolView, ledger: Ledger | None, models: int, gateway: GatewayView, endpoint: str, fresh: Sequence[Decision], now: datetime
) -> InferencePoolStatus:
    """The whole status; `fresh` are the decisions of this plan."""
    conditions = Conditions(pool.status.conditions, pool.generation, now)
    if ledger is None or pool.spec is None:
        conditions.set(PoolCondition.ACCEPTED, False, Reason.SPEC_REFUSED, pool.spec_error)
        for kind in (PoolCondition.CAPACITY, PoolCondition.GATEWAY, PoolCondition.NOT_YET_EFFECTIVE):
            conditions.set(kind, None, Reason.PENDING, "not planned: the spec cannot be used; what runs is kept as it is")
        conditions.set(PoolCondition.READY, False, Reason.SPEC_REFUSED, pool.spec_error)
        return pool.status.model_copy(update={"observed_generation": pool.generation, "conditions": conditions.result()})
    conditions.set(PoolCondition.ACCEPTED, True, Reason.ACCEPTED, f"mode {pool.spec.mode.value}")
    capacity_reason = _capacity(conditions, pool, ledger)
    _gateway(conditions, gateway)
    fields = pool_fields_without_effect(pool.spec)
    if fields:
        message = f"set, but without full effect in this release: {'; '.join(fields)}"
        conditions.set(PoolCondition.NOT_YET_EFFECTIVE, True, Reason.FIELDS_NOT_YET_EFFECTIVE, message)
    else:
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
        decisions=[*pool.status.decisions, *fresh][-MAX_DECISIONS:],
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


def _gateway(conditions: Conditions, gateway: GatewayView) -> None:
    if gateway.ready_replicas:
        conditions.set(PoolCondition.GATEWAY, True, Reason.GATEWAY_READY, f"{gateway.ready_replicas} gateway replica(s) serve")
    else:
        conditions.set(PoolCondition.GATEWAY, False, Reason.GATEWAY_UNAVAILABLE, "no gateway replica is ready; see its Deployment and pods")


def _ready(conditions: Conditions, ledger: Ledger, gateway: GatewayView, capacity_reason: Reason) -> None:
    if ledger.capacity.nominal == 0:
        conditions.set(PoolCondition.READY, False, Reason.NO_NODES, "the pool has no NPUs")
    elif not gateway.ready_replicas:
        conditions.set(PoolCondition.READY, False, Reason.GATEWAY_UNAVAILABLE, "no gateway replica is ready")
    elif capacity_reason is not Reason.AS_EXPECTED:
        conditions.set(PoolCondition.READY, True, Reason.DEGRADED, f"serving with less than nominal: {capacity_reason.value}")
    else:
        conditions.set(PoolCondition.READY, True, Reason.READY, "serving")
