"""The part of a plan that concerns one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from npufleet_api.conditions import Reason
from npufleet_api.contract import REVISION_LABEL
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.acceptance import Refusal
from npufleet_operator.core.actions import Choice, CreatePod, Manifest, ObjectId
from npufleet_operator.core.allocation import ClassAccount, Grant
from npufleet_operator.core.capacity import Capacity
from npufleet_operator.core.naming import pod_name, settings_child
from npufleet_operator.core.objects.config_map import build_engine_settings, build_monitor_settings
from npufleet_operator.core.objects.disruption_budget import build_disruption_budget
from npufleet_operator.core.objects.network_policy import build_network_policy
from npufleet_operator.core.objects.pod import Blueprint, build_pod
from npufleet_operator.core.objects.service import build_service
from npufleet_operator.core.observed import ModelView, OperatorConfig
from npufleet_operator.core.replicas import Situation, Steps, replace_in_place, steps, wind_down


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model: what it is, what it needs, what is done."""

    model: ModelView
    spec: AscendModelSpec | None
    situation: Situation
    steps: Steps
    refusal: Refusal | None = None
    design: Blueprint | None = None
    objects: tuple[Manifest, ...] = ()
    keep: tuple[ObjectId, ...] = ()
    creates: tuple[CreatePod, ...] = ()
    choices: tuple[Choice, ...] = ()
    waits_for_spare: bool = False


def propose(
    model: ModelView,
    situation: Situation,
    design: Blueprint | None,
    refusal: Refusal | None,
    pool: InferencePoolSpec,
    config: OperatorConfig,
) -> ModelPlan:
    """What the model needs, before NPUs are handed out. A refused model keeps what runs; drains that have begun go on."""
    if design is None or refusal is not None:
        wound = wind_down(situation)
        return ModelPlan(model, model.spec, situation, wound, refusal, choices=tuple(_retirements(model, situation, wound)))
    objects: list[Manifest] = [
        build_engine_settings(model, design),
        build_monitor_settings(model, pool),
        build_service(model),
        build_network_policy(model, config.namespace),
    ]
    if situation.desired > 0:
        objects.append(build_disruption_budget(model, situation.desired))
    r = situation.replicas
    revisions = {pod.labels.get(REVISION_LABEL, "") for pod in (*r.live, *r.draining, *r.terminating)}
    keep = tuple(("ConfigMap", model.namespace, settings_child(model.name, revision)) for revision in sorted(revisions))
    return ModelPlan(model, model.spec, situation, steps(situation), None, design, tuple(objects), keep)


def decide(proposal: ModelPlan, grant: Grant, short: Refusal | None, taken: set[tuple[str, str]], load: Mapping[str, int]) -> ModelPlan:
    """The proposal with its granted replicas. `taken` holds namespace and name of every pod, and grows by the new ones."""
    if proposal.design is None:
        return proposal
    todo = proposal.steps
    waits = False
    if todo.surge and not grant.surge:
        swap = replace_in_place(proposal.situation, room_elsewhere=grant.surge_has_room)
        waits = not (swap.drains or swap.deletes)
        todo = replace(todo, drains=todo.drains + swap.drains, deletes=todo.deletes + swap.deletes)
    creates = []
    choices = list(_retirements(proposal.model, proposal.situation, todo))
    for index in range(grant.missing + grant.surge):
        manifest = build_pod(proposal.model, proposal.design, _free_slot(proposal, taken))
        creates.append(CreatePod(proposal.model.key, manifest))
        reason = Reason.SCALED_UP if index < grant.missing else Reason.ROLLOUT_SURGE
        choices.append(Choice(proposal.model.key, reason, _created(proposal, manifest, index)))
    if short:
        reason = Reason.CLAMPED_BY_CAPACITY if short.reason in (Reason.NO_CAPACITY, Reason.NO_NODES) else Reason.CLAMPED_BY_CEILING
        choices.append(Choice(proposal.model.key, reason, short.message))
    return replace(proposal, steps=todo, creates=tuple(creates), choices=tuple(choices), waits_for_spare=waits)


def shortage(proposal: ModelPlan, grant: Grant, account: ClassAccount, room: Capacity) -> Refusal | None:
    """Why the model gets fewer replicas than it wants, and what would help."""
    if proposal.spec is None or grant.missing >= proposal.steps.missing:
        return None
    npus = proposal.spec.parallelism.npus
    wanted = f"{proposal.situation.desired} replicas of {npus} NPU(s) are wanted"
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
    if grant.by_ceiling and not grant.by_room and account.ceiling < room.nominal:
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
    return f"starts {manifest['metadata']['name']}: replica {number}, {proposal.situation.desired} wanted, {npus} NPU(s)"


def _retirements(model: ModelView, s: Situation, todo: Steps) -> list[Choice]:
    choices = [
        Choice(
            model.key, d.reason, f"drains {d.pod.name}: {s.load.get(d.pod.uid, 0)} requests in flight, {d.deadline_seconds:.0f} s at most"
        )
        for d in todo.drains
        if d.pod.drain_started is None
    ]
    choices += [Choice(model.key, Reason.DRAIN_CANCELLED, f"{c.pod.name} is wanted again") for c in todo.cancels]
    choices += [Choice(model.key, d.reason, f"deletes {d.pod.name}") for d in todo.deletes]
    return choices
