"""An AscendModel's status: figures and conditions, from the plan that was made for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from npufleet_api.conditions import ModelCondition, Reason
from npufleet_api.fetching import FetchProgress
from npufleet_api.model import AscendModelSpec, AscendModelStatus, Rollout, ScalingStatus
from npufleet_api.pool import Decision
from npufleet_api.sources import Scheme, is_pinned, known_uri
from npufleet_operator.core.acceptance import Refusal, model_fields_without_effect, pin_advice
from npufleet_operator.core.autoscale.target import Target
from npufleet_operator.core.conditions import Conditions, timestamp
from npufleet_operator.core.measured import Measured, measured_slo
from npufleet_operator.core.objects.pod import Blueprint
from npufleet_operator.core.observed import ModelView
from npufleet_operator.core.replicas import Replicas
from npufleet_operator.core.source_status import source_status
from npufleet_operator.core.trouble import Trouble, worst


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was planned for one model."""

    model: ModelView
    replicas: Replicas
    desired: int
    npus_charged: int
    refusal: Refusal | None = None
    plan: Blueprint | None = None
    short: Refusal | None = None
    """Why fewer replicas run than are wanted, where NPUs are the reason."""
    waits_for_spare: bool = False
    preloading: int = 0
    endpoint: str = ""
    name_keeper: ModelView | None = None
    create_refused: str = ""
    decision: Decision | None = None
    fetches: Mapping[str, FetchProgress] = field(default_factory=dict)
    scaled: bool = False
    """Replicas are added or drained by this plan."""
    target: Target | None = None
    advisory: bool = False


def model_status(o: Outcome, measured: Measured, now: datetime) -> AscendModelStatus:
    """The whole status."""
    conditions = Conditions(o.model.status.conditions, o.model.generation, now)
    trouble = worst([pod for pod in o.replicas.live if not pod.engine_ready])
    _accepted(conditions, o)
    _capacity(conditions, o)
    _available(conditions, o, trouble)
    _rolled_out(conditions, o, trouble)
    _routed(conditions, o)
    _pinned(conditions, o)
    _effective(conditions, o.model.spec)
    _ready(conditions, o, trouble)
    spec = o.model.spec
    before = o.model.status
    values = {
        "observed_generation": o.model.generation,
        "replicas": len(o.replicas.live),
        "ready_replicas": o.replicas.ready,
        "desired_replicas": o.desired,
        "draining_replicas": o.replicas.leaving,
        "updated_replicas": len(o.replicas.current),
        "npus": o.npus_charged,
        "revision": o.plan.revision if o.plan else before.revision,
        "endpoint": o.endpoint,
        "served_name": o.model.served_name,
        "slo": measured_slo(measured, o.model.key, spec) if spec else None,
        "engine": o.plan.resolved if o.plan else before.engine,
        "last_decision": o.decision or before.last_decision,
        "scaling": _scaling(o, now),
        "source": source_status(o.model, (*o.replicas.live, *o.replicas.draining), o.fetches),
        "last_scaled_time": o.decision.time if o.decision and o.scaled else before.last_scaled_time,
        "conditions": conditions.result(),
    }
    # The very object where nothing is new: hundreds of models at rest are then neither validated nor compared again.
    return before if all(getattr(before, name) == value for name, value in values.items()) else AscendModelStatus.model_validate(values)


def _scaling(o: Outcome, now: datetime) -> ScalingStatus | None:
    """With the moves of this plan remembered; advice moves nothing."""
    target = o.target
    if target is None:
        return o.model.status.scaling
    if not target.elastic or o.advisory or o.desired == target.base:
        return target.status
    moved = "last_up_time" if o.desired > target.base else "last_down_time"
    return target.status.model_copy(update={moved: timestamp(now), "attained": list(target.known)})


def _accepted(conditions: Conditions, o: Outcome) -> None:
    if o.refusal:
        conditions.set(ModelCondition.ACCEPTED, False, o.refusal.reason, o.refusal.message)
    else:
        conditions.set(ModelCondition.ACCEPTED, True, Reason.ACCEPTED, f"accepted by pool {o.model.pool_name!r}")


def _capacity(conditions: Conditions, o: Outcome) -> None:
    if o.refusal:
        conditions.set(ModelCondition.CAPACITY, None, Reason.PENDING, "not planned: the model is not accepted")
    elif o.short:
        conditions.set(ModelCondition.CAPACITY, False, o.short.reason, o.short.message)
    else:
        conditions.set(ModelCondition.CAPACITY, True, Reason.AS_EXPECTED, f"{o.npus_charged} NPUs are charged to the model")


def _available(conditions: Conditions, o: Outcome, trouble: Trouble | None) -> None:
    ready = o.replicas.ready
    if ready:
        conditions.set(ModelCondition.AVAILABLE, True, Reason.READY, f"{ready} of {o.desired} replicas serve")
        return
    reason, message = _idle_reason(o, trouble)
    conditions.set(ModelCondition.AVAILABLE, False, reason, message)


def _idle_reason(o: Outcome, trouble: Trouble | None) -> tuple[Reason, str]:
    """Why no replica serves."""
    if o.create_refused:
        return Reason.CREATE_REFUSED, f"the API server refused an object of the model: {o.create_refused}"
    if trouble:
        return trouble.reason, trouble.message
    if o.refusal:
        return o.refusal.reason, o.refusal.message
    if o.desired == 0:
        elastic = o.target is not None and o.target.elastic
        return (
            Reason.SCALED_TO_ZERO,
            "no request came; the next one starts a replica" if elastic else "spec.replicas is 0; raise it to serve",
        )
    if o.short:
        return o.short.reason, o.short.message
    return Reason.LOADING, "replicas are being created"


def _rolled_out(conditions: Conditions, o: Outcome, trouble: Trouble | None) -> None:
    old = len(o.replicas.outdated)
    if o.refusal or o.plan is None:
        conditions.set(ModelCondition.ROLLED_OUT, None, Reason.PENDING, "not planned: what runs is kept as it is")
    elif not old and not o.replicas.draining and len(o.replicas.current) >= o.desired:
        conditions.set(ModelCondition.ROLLED_OUT, True, Reason.ROLLED_OUT, f"all replicas are of revision {o.plan.revision}")
    elif o.preloading:
        conditions.set(
            ModelCondition.ROLLED_OUT,
            False,
            Reason.PRELOADING,
            f"revision {o.plan.revision}: its files are brought into {o.preloading} cache(s) first; {old} old replica(s) serve",
        )
    elif o.waits_for_spare:
        remedy = (
            "free NPUs, raise the class's maxPercent, or set spec.rollout to Recreate to accept a gap"
            if o.model.spec and o.model.spec.rollout is Rollout.ROLLING_UPDATE
            else "free NPUs"
        )
        conditions.set(
            ModelCondition.ROLLED_OUT,
            False,
            Reason.WAITING_FOR_SPARE,
            f"{old} replica(s) wait to be replaced: the only one that serves is not taken away while no NPUs are spare; {remedy}",
        )
    else:
        conditions.set(
            ModelCondition.ROLLED_OUT,
            False,
            Reason.ROLLING_OUT,
            f"revision {o.plan.revision}: {len(o.replicas.current)} of {o.desired} replicas, {old} to be replaced, "
            f"{o.replicas.leaving} leaving{_stuck(trouble)}",
        )


def _stuck(trouble: Trouble | None) -> str:
    """What keeps a new replica from taking over, where it is more than time."""
    if trouble is None or trouble.reason in (Reason.LOADING, Reason.FETCHING):
        return ""
    return f"; {trouble.reason}: {trouble.message}"


def _routed(conditions: Conditions, o: Outcome) -> None:
    name, keeper = o.model.served_name, o.name_keeper
    if keeper is None or keeper.uid == o.model.uid:
        conditions.set(ModelCondition.ROUTED, True, Reason.ROUTED, f"clients reach the model as {name!r} and {'/'.join(o.model.key)!r}")
        return
    conditions.set(
        ModelCondition.ROUTED,
        False,
        Reason.SERVED_NAME_TAKEN,
        f"spec.model.servedName: {name!r} belongs to the older model {'/'.join(keeper.key)}; clients reach this one as "
        f"{'/'.join(o.model.key)!r}; choose another servedName",
    )


def _pinned(conditions: Conditions, o: Outcome) -> None:
    spec = o.model.spec
    uri = known_uri(spec.model.uri) if spec else None
    if spec is None or uri is None:
        conditions.set(ModelCondition.PINNED, None, Reason.PENDING, "not judged: the spec cannot be used")
        return
    if uri.scheme is Scheme.VOLUME:
        conditions.set(ModelCondition.PINNED, True, Reason.AS_EXPECTED, "the volume's owner decides what it holds")
    elif is_pinned(uri, spec.model.revision, spec.model.digest):
        conditions.set(ModelCondition.PINNED, True, Reason.PINNED_REVISION, "whatever starts from this spec serves the same files")
    else:
        advice = pin_advice(uri, o.model.status.source)
        message = f"{spec.model.revision or 'the default revision'} can come to mean other files; to pin what is served now, {advice}"
        conditions.set(ModelCondition.PINNED, False, Reason.FLOATING, message)


def _effective(conditions: Conditions, spec: AscendModelSpec | None) -> None:
    fields = model_fields_without_effect(spec) if spec else []
    if fields:
        message = f"set, but without effect in this release: {'; '.join(fields)}"
        conditions.set(ModelCondition.NOT_YET_EFFECTIVE, True, Reason.FIELDS_NOT_YET_EFFECTIVE, message)
    else:
        conditions.set(ModelCondition.NOT_YET_EFFECTIVE, False, Reason.ALL_EFFECTIVE, "every field that is set has its effect")


def _ready(conditions: Conditions, o: Outcome, trouble: Trouble | None) -> None:
    ready = o.replicas.ready
    if o.refusal:
        conditions.set(ModelCondition.READY, False, o.refusal.reason, o.refusal.message)
    elif ready >= o.desired > 0:
        conditions.set(ModelCondition.READY, True, Reason.READY, f"{ready} of {o.desired} replicas serve")
    elif ready:
        reason, message = _idle_reason(o, trouble)
        conditions.set(ModelCondition.READY, False, Reason.DEGRADED, f"{ready} of {o.desired} replicas serve: {reason}: {message}")
    else:
        conditions.set(ModelCondition.READY, False, *_idle_reason(o, trouble))
