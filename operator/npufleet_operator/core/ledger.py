"""The pool's books: NPUs charged to each class and model, draining and pending included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npufleet_api.contract import CLASS_LABEL
from npufleet_api.pool import ClassLedger, InferencePoolSpec
from npufleet_operator.core.acceptance import class_bounds
from npufleet_operator.core.allocation import ClassAccount
from npufleet_operator.core.capacity import Capacity, is_ours, leaving
from npufleet_operator.core.observed import ModelView, PodView


@dataclass(frozen=True, slots=True)
class Ledger:
    """NPUs of the pool and of each class."""

    capacity: Capacity
    classes: tuple[ClassLedger, ...]
    allocated: int
    """NPUs charged to the pool's models, of whatever class."""
    draining: int


def _class_of(pod: PodView, models: Mapping[str, ModelView]) -> str:
    """The class that a pod is charged to: its model's, or the one that it was created in when the model is gone."""
    model = models.get(pod.owner_uid)
    return model.spec.workload_class if model and model.spec else pod.labels.get(CLASS_LABEL, "")


def charged_npus(resource: str, pods: Sequence[PodView]) -> int:
    """NPUs that pods hold."""
    return sum(pod.requests.get(resource, 0) for pod in pods if not pod.finished)


class Books:
    """Charges of one observation, by class."""

    def __init__(
        self, spec: InferencePoolSpec, pool: str, capacity: Capacity, pods: Sequence[PodView], models: Mapping[str, ModelView]
    ) -> None:
        self._spec = spec
        self._capacity = capacity
        self._charges: dict[str, list[tuple[int, PodView]]] = {}
        for pod in pods:
            npus = pod.requests.get(spec.npus.resource_name, 0)
            if not pod.finished and is_ours(pod, pool, models):
                self._charges.setdefault(_class_of(pod, models), []).append((npus, pod))

    def accounts(self) -> dict[str, ClassAccount]:
        """Each class's bounds and charge. Where guarantees exceed the supply, those of higher priority are kept first."""
        left = self._capacity.supply
        result = {}
        for workload_class in sorted(self._spec.classes, key=lambda c: (-c.priority, c.name)):
            nominal, ceiling = class_bounds(workload_class, self._capacity.nominal)
            guarantee = min(nominal, left)
            left -= guarantee
            charged = sum(npus for npus, _ in self._charges.get(workload_class.name, ()))
            result[workload_class.name] = ClassAccount(
                workload_class.name, workload_class.priority, guarantee, ceiling, charged, nominal_guarantee=nominal
            )
        return result

    def ledger(self, accounts: Mapping[str, ClassAccount], wanted: Mapping[str, int]) -> Ledger:
        """What the pool's status shows. `wanted` are the NPUs that each class's models want."""
        lent = self._lent(accounts)
        classes = []
        for workload_class in self._spec.classes:
            account = accounts[workload_class.name]
            mine = self._charges.get(workload_class.name, [])
            classes.append(
                ClassLedger(
                    name=workload_class.name,
                    guaranteed=account.guarantee,
                    ceiling=account.ceiling,
                    used=account.charged,
                    borrowed=max(0, account.charged - account.guarantee),
                    lent=lent[workload_class.name],
                    wanted=wanted.get(workload_class.name, 0),
                    draining=sum(npus for npus, pod in mine if leaving(pod)),
                    pending=sum(npus for npus, pod in mine if not leaving(pod) and not pod.engine_ready),
                )
            )
        charges = [charge for mine in self._charges.values() for charge in mine]
        return Ledger(
            capacity=self._capacity,
            classes=tuple(classes),
            allocated=sum(npus for npus, _ in charges),
            draining=sum(npus for npus, pod in charges if leaving(pod)),
        )

    def _lent(self, accounts: Mapping[str, ClassAccount]) -> dict[str, int]:
        """What is borrowed beyond NPUs that nobody is guaranteed comes from idle guarantees: those of the lowest priority first."""
        unguaranteed = max(0, self._capacity.supply - sum(a.guarantee for a in accounts.values()))
        owed = max(0, sum(max(0, a.charged - a.guarantee) for a in accounts.values()) - unguaranteed)
        result = {}
        for account in sorted(accounts.values(), key=lambda a: (-a.priority, a.name), reverse=True):
            result[account.name] = min(max(0, account.guarantee - account.charged), owed)
            owed -= result[account.name]
        return result
