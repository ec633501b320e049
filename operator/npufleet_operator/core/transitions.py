"""What a plan changes in conditions of a pool and its models that people are told of by Events."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_api.conditions import Condition, ConditionStatus, ModelCondition, PoolCondition, Reason
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import ModelKey, Observed

PASSING = frozenset({Reason.LOADING, Reason.PENDING, Reason.SCALED_TO_ZERO, Reason.GUARANTEE_WAITING})
"""Reasons that pass by themselves, or that somebody asked for."""


@dataclass(frozen=True, slots=True)
class Transition:
    """Something to tell about a model, or about the pool where `model` is None."""

    model: ModelKey | None
    reason: str
    message: str
    warning: bool


TOLD_OF_POOLS = (PoolCondition.READY, PoolCondition.GUARANTEES, PoolCondition.NODES)


def condition_transitions(observed: Observed, plan: Plan) -> list[Transition]:
    """One per resource whose Ready, and for a pool also its guarantees and nodes, changed status or reason; the pool first."""
    transitions = []
    if observed.pool and plan.pool_status:
        for kind in TOLD_OF_POOLS:
            before, after = observed.pool.status.condition(kind), plan.pool_status.condition(kind)
            if kind is PoolCondition.READY or before or (after and after.status is not ConditionStatus.TRUE):
                transitions += _changed(None, before, after)
    for model in observed.models:
        status = plan.model_status.get(model.key)
        if status:
            transitions += _changed(model.key, model.status.condition(ModelCondition.READY), status.condition(ModelCondition.READY))
    return transitions


def _changed(model: ModelKey | None, before: Condition | None, after: Condition | None) -> list[Transition]:
    if after is None or (before and (before.status, before.reason) == (after.status, after.reason)):
        return []
    warning = after.reason == Reason.DEGRADED or (after.status is not ConditionStatus.TRUE and after.reason not in PASSING)
    return [Transition(model, after.reason, after.message, warning)]
