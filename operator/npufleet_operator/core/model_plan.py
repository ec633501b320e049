"""The part of a plan that concerns one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npufleet_api.conditions import Reason
from npufleet_api.contract import REVISION_LABEL
from npufleet_api.model import AscendModelSpec, Rollout
from npufleet_operator.core.acceptance import Refusal
from npufleet_operator.core.actions import Choice, CreatePod, Manifest, ObjectId
from npufleet_operator.core.allocation import ClassAccount, Grant, Victim
from npufleet_operator.core.autoscale.target import Target
from npufleet_operator.core.capacity import Capacity, could_hold
from npufleet_operator.core.designs import Design
from npufleet_operator.core.naming import pod_name, settings_child
from npufleet_operator.core.objects.disruption_budget import build_disruption_budget
from npufleet_operator.core.objects.pod import build_pod
from npufleet_operator.core.observed import ModelView, PodView
from npufleet_operator.core.preloading import NONE as NOTHING_TO_PRELOAD
from npufleet_operator.core.preloading import Preloading
from npufleet_operator.core.replicas import Replicas, Situation, Steps, replace_in_place, retire, spare, steps, wind_down

HOLDS = frozenset(
    {
        Reason.HOLD_PENDING,
        Reason.HOLD_NO_DATA,
        Reason.HOLD_COOLDOWN,
        Reason.SCALE_DOWN_UNSAFE,
        Reason.SLO_UNATTAINABLE,
        Reason.CLAMPED_BY_MAXIMUM,
    }
)
"""Reasons for which nothing is moved; published when they begin, not while they last."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model: what it is, what it needs, what is done."""

    model: ModelView
    spec: AscendModelSpec | None
    situation: Situation
    steps: Steps
    target: Target
    refusal: Refusal | None = None
    design: Design | None = None
    objects: tuple[Manifest, ...] = ()
    keep: tuple[ObjectId, ...] = ()
    creates: tuple[CreatePod, ...] = ()
    choices: tuple[Choice, ...] = ()
    waits_for_spare: bool = False
    preloading: int = 0
    """Caches that the rollout waits for."""
    short: Refusal | None = None
    """Why fewer replicas run than are wanted, where NPUs are the reason."""

    @property
    def desired(self) -> int:
        """Replicas that the pool grants the model."""
        return self.situation.desired


def propose(
    model: ModelView,
    situation: Situation,
    target: Target,
    design: Design | None,
    refusal: Refusal | None,
    preload: Preloading = NOTHING_TO_PRELOAD,
) -> ModelPlan:
    """What the model needs, before NPUs are handed out. A refused model keeps what runs; drains that have begun go on."""
    if design is None or refusal is not None:
        wound = wind_down(situation)
        return ModelPlan(model, model.spec, situation, wound, target, refusal, choices=tuple(_retirements(model, situation, wound)))
    r = situation.replicas
    revisions = {pod.labels.get(REVISION_LABEL, "") for pod in (*r.live, *r.draining, *r.terminating)}
    keep = tuple(("ConfigMap", model.namespace, settings_child(model.name, revision)) for revision in sorted(revisions))
    todo = steps(situation)
    if preload.waiting:
        todo = replace(todo, surge=0)
    objects = (*design.objects, *preload.jobs)
    return ModelPlan(model, model.spec, situation, todo, target, None, design, objects, keep, preloading=preload.waiting)


def decide(
    proposal: ModelPlan, grant: Grant, short: Refusal | None, victims: Sequence[Victim], taken: set[tuple[str, str]], *, unclaimed: bool
) -> ModelPlan:
    """The proposal with its granted replicas and without its `victims`. `taken` holds namespace and name of every pod, and grows by the
    new ones. `unclaimed`: no guarantee waits, so that what was reclaimed and still drains may stay."""
    design = proposal.design
    if design is None:
        return proposal
    todo = proposal.steps
    spared = spare(proposal.situation, todo.missing - grant.missing) if unclaimed else ()
    running = len(proposal.situation.replicas.live) + len(todo.cancels) + len(spared) + grant.missing
    situation, granted = proposal.situation, proposal.target.granted(running, len(victims))
    if granted != situation.desired:
        situation = replace(situation, desired=granted)
        proposal = replace(proposal, situation=situation)
    waits = False
    if victims:
        for victim in victims:
            gone = retire(situation, [victim.holding.pod], victim.reason)
            todo = replace(todo, drains=todo.drains + gone.drains, deletes=todo.deletes + gone.deletes)
    elif todo.surge and not grant.surge:
        swap = replace_in_place(situation, room_elsewhere=grant.surge_has_room)
        waits = not (swap.drains or swap.deletes)
        todo = replace(todo, drains=todo.drains + swap.drains, deletes=todo.deletes + swap.deletes)
    if spared:
        todo = without_steps_for(todo, {cancel.pod.uid for cancel in spared})
        todo = replace(todo, cancels=todo.cancels + spared)
    creates = []
    choices = [*_move(proposal), *_retirements(proposal.model, situation, todo, victims)]
    for index in range(grant.missing + grant.surge):
        manifest = build_pod(
            proposal.model, design.blueprint, _free_slot(proposal, taken), grant.nodes[index] if index < len(grant.nodes) else ""
        )
        creates.append(CreatePod(proposal.model.key, manifest))
        reason = Reason.SCALED_UP if index < grant.missing else Reason.ROLLOUT_SURGE
        choices.append(Choice(proposal.model.key, reason, _created(proposal, manifest, index)))
    if short and not spared:
        reason = Reason.CLAMPED_BY_CAPACITY if short.reason in (Reason.NO_CAPACITY, Reason.NO_NODES) else Reason.CLAMPED_BY_CEILING
        choices.append(Choice(proposal.model.key, reason, short.message))
    objects = proposal.objects
    if situation.desired > 0:
        objects = (*objects, build_disruption_budget(proposal.model, situation.desired))
    return replace(
        proposal,
        steps=todo,
        objects=objects,
        creates=tuple(creates),
        choices=tuple(choices),
        waits_for_spare=waits,
        short=short if not spared else None,
    )


def without_steps_for(todo: Steps, uids: set[str]) -> Steps:
    """Without the drains and deletions of some pods."""
    return replace(
        todo,
        drains=tuple(d for d in todo.drains if d.pod.uid not in uids),
        deletes=tuple(d for d in todo.deletes if d.pod.uid not in uids),
    )


def _move(proposal: ModelPlan) -> list[Choice]:
    """What elastic scaling decided, where it moves something, or where it begins to hold something back."""
    target, before = proposal.target, proposal.model.status.scaling
    if not target.elastic:
        return []
    if (proposal.desired - target.base) * (target.wanted - target.base) > 0:
        return [Choice(proposal.model.key, target.reason, f"{target.base} → {proposal.desired} replicas: {target.message}")]
    if target.reason in HOLDS and (before is None or before.reason != target.reason):
        return [Choice(proposal.model.key, target.reason, target.message)]
    return []


def successor_fits(model: ModelView, replicas: Replicas, resource: str, account: ClassAccount, capacity: Capacity) -> bool:
    """Whether a new replica would find room once outdated ones have gone: all of them, or all but one that serves."""
    spec, outdated = model.spec, replicas.outdated
    if spec is None or not outdated:
        return True
    kept: Sequence[PodView | None] = [None]
    if spec.rollout is Rollout.ROLLING_UPDATE and not any(pod.engine_ready for pod in replicas.current):
        kept = [pod for pod in outdated if pod.engine_ready] or [None]
    npus = spec.parallelism.npus
    for stays in kept:
        gone = [pod for pod in outdated if pod is not stays]
        charged = account.charged - sum(pod.requests.get(resource, 0) for pod in gone)
        if charged + npus <= account.ceiling and could_hold(capacity, resource, npus, gone):
            return True
    return False


def shortage(proposal: ModelPlan, grant: Grant, account: ClassAccount, room: Capacity) -> Refusal | None:
    """Why the model gets fewer replicas than it wants, and what would help."""
    if proposal.spec is None:
        return None
    replicas = proposal.situation.replicas
    under_way = replicas.leaving > 0 or any(not pod.engine_ready for pod in replicas.current)
    refused_surge = proposal.steps.surge > grant.surge and not proposal.situation.successor_fits and not under_way
    if grant.missing >= proposal.steps.missing and not refused_surge:
        return None
    npus = proposal.spec.parallelism.npus
    wanted = f"{proposal.target.wanted} replicas of {npus} NPU(s) are wanted"
    if room.nominal == 0:
        return Refusal(Reason.NO_NODES, f"{wanted}, but the pool has no NPUs: see its conditions")
    if npus > room.largest_node:
        return Refusal(
            Reason.NO_CAPACITY,
            f"spec.parallelism: one replica takes {npus} NPUs, the largest node of the pool has {room.largest_node}: lower it or add nodes",
        )
    if npus > account.ceiling:
        return Refusal(
            Reason.CEILING_BELOW_REPLICA,
            f"one replica takes {npus} NPU(s), class {account.name!r} may hold {account.ceiling}: raise its maxPercent in the pool",
        )
    by_ceiling = grant.by_ceiling or (refused_surge and grant.surge_has_room)
    if by_ceiling and not grant.by_room and account.ceiling < room.nominal:
        return Refusal(
            Reason.CLAMPED_BY_CEILING,
            f"{wanted}, but class {account.name!r} may hold {account.ceiling} NPUs: raise its maxPercent, or ask for fewer replicas",
        )
    return Refusal(
        Reason.NO_CAPACITY,
        f"{wanted}, but {sum(room.free.values())} of the pool's {room.supply} usable NPUs are free (at most "
        f"{max(room.free.values(), default=0)} on one node): free some, ask for fewer replicas, or add nodes",
    )


def _free_slot(proposal: ModelPlan, taken: set[tuple[str, str]]) -> int:
    """The lowest slot whose pod name nobody holds, terminating pods included."""
    model, revision = proposal.model, proposal.situation.revision
    slot = 0
    while (model.namespace, pod_name(model.name, revision, slot)) in taken:
        slot += 1
    taken.add((model.namespace, pod_name(model.name, revision, slot)))
    return slot


def _created(proposal: ModelPlan, manifest: Manifest, index: int) -> str:
    number = len(proposal.situation.replicas.live) + index + 1
    npus = proposal.spec.parallelism.npus if proposal.spec else 0
    return f"starts {manifest['metadata']['name']}: replica {number}, {proposal.target.wanted} wanted, {npus} NPU(s)"


def _retirements(model: ModelView, s: Situation, todo: Steps, victims: Sequence[Victim] = ()) -> list[Choice]:
    claimants = {
        victim.holding.pod.uid: f" for {'/'.join(victim.claimant)}{f' ({victim.why})' if victim.why else ''}" for victim in victims
    }
    choices = [
        Choice(
            model.key,
            d.reason,
            f"drains {d.pod.name}{claimants.get(d.pod.uid, '')}: {s.load.get(d.pod.uid, 0)} requests in flight, "
            f"{d.deadline_seconds:.0f} s at most",
        )
        for d in todo.drains
        if d.pod.drain_started is None
    ]
    choices += [Choice(model.key, Reason.DRAIN_CANCELLED, f"{c.pod.name} is wanted again") for c in todo.cancels]
    choices += [Choice(model.key, d.reason, f"deletes {d.pod.name}{claimants.get(d.pod.uid, '')}") for d in todo.deletes]
    return choices
