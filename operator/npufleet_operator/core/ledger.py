"""The pool's books: NPUs charged to each class and model, draining and pending included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npufleet_api.contract import CLASS_LABEL
from npufleet_api.pool import ClassLedger, InferencePoolSpec
from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.allocation import ClassAccount
from npufleet_operator.core.capacity import Capacity, is_ours
from npufleet_operator.core.observed import ModelView, PodView
from npufleet_operator.core.pool_status import Ledger


def _class_of(pod: PodView, models: Mapping[str, ModelView]) -> str:
    """The class that a pod is charged to: its model's, or the one that it was created in when the model is gone."""
    model = models.get(pod.owner_uid)
    return model.spec.workload_class if model and model.spec else pod.labels.get(CLASS_LABEL, "")


def _charges(resource: str, pool: str, pods: Sequence[PodView], models: Mapping[str, ModelView]) -> list[tuple[str, int, PodView]]:
    return [(_class_of(pod, models), pod.requests.get(resource, 0), pod) for pod in pods if not pod.finished and is_ours(pod, pool, models)]


def charged_npus(resource: str, pods: Sequence[PodView]) -> int:
    """NPUs that pods hold."""
    return sum(pod.requests.get(resource, 0) for pod in pods if not pod.finished)


def accounts(
    spec: InferencePoolSpec, pool: str, nominal: int, pods: Sequence[PodView], models: Mapping[str, ModelView]
) -> dict[str, ClassAccount]:
    """Each class's bounds and charge."""
    charges = _charges(spec.npus.resource_name, pool, pods, models)
    result = {}
    for workload_class in spec.classes:
        guarantee, ceiling = class_bounds(workload_class, nominal)
        charged = sum(npus for name, npus, _ in charges if name == workload_class.name)
        result[workload_class.name] = ClassAccount(workload_class.name, workload_class.priority, guarantee, ceiling, charged)
    return result


def ledger(spec: InferencePoolSpec, pool: str, room: Capacity, pods: Sequence[PodView], models: Mapping[str, ModelView]) -> Ledger:
    """What the pool's status shows."""
    charges = _charges(spec.npus.resource_name, pool, pods, models)
    classes = []
    for workload_class in spec.classes:
        guarantee, ceiling = class_bounds(workload_class, room.nominal)
        mine = [(npus, pod) for name, npus, pod in charges if name == workload_class.name]
        used = sum(npus for npus, _ in mine)
        classes.append(
            ClassLedger(
                name=workload_class.name,
                guaranteed=guarantee,
                ceiling=ceiling,
                used=used,
                borrowed=max(0, used - guarantee),
                draining=sum(npus for npus, pod in mine if _leaving(pod)),
                pending=sum(npus for npus, pod in mine if not _leaving(pod) and not pod.engine_ready),
            )
        )
    return Ledger(
        capacity=room,
        classes=tuple(classes),
        allocated=sum(npus for _, npus, _ in charges),
        draining=sum(npus for _, npus, pod in charges if _leaving(pod)),
    )


def _leaving(pod: PodView) -> bool:
    return pod.terminating or pod.drain_started is not None
