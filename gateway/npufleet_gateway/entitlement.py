"""What each class is entitled to of a number of slots: the rules of the pool's ledger, at the level of requests. Pure.

1. Guarantee first: a class with demand gets its guaranteed share of the slots, or what it has demand for.
2. What is left, because a class is idle or nobody is guaranteed it, is lent by priority, up to the borrower's ceiling; classes of equal
   priority share it evenly.
3. Slots that no ceiling allows anybody to use are lent by priority all the same: a ceiling keeps NPUs from other classes, and a slot that
   nobody wants keeps nothing from anyone.

A class without a guarantee is entitled to MIN_SHARE, so that nothing starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """A workload class. `share` (guarantee) and `ceiling` are parts of 1."""

    name: str
    priority: int = 0
    share: float = 0.0
    ceiling: float = 1.0
    claimable: bool = False
    """Whether any request may claim the class by header."""

    @property
    def guarantee(self) -> float:
        """The share that holds under saturation whatever others ask for."""
        return max(self.share, MIN_SHARE)


def guaranteed(slots: float, classes: Mapping[str, ClassPolicy]) -> dict[str, float]:
    """Slots that each class gets when all saturate the model."""
    scale = max(1.0, sum(policy.guarantee for policy in classes.values()))
    return {name: slots * policy.guarantee / scale for name, policy in classes.items()}


def entitled(slots: float, demand: Mapping[str, float], classes: Mapping[str, ClassPolicy]) -> dict[str, float]:
    """Slots of each class in `demand` (running and queued requests); together the lesser of `slots` and all demand.

    A class that `classes` does not know is taken as one without guarantee and of the lowest priority.
    """
    known = {name: classes.get(name) or ClassPolicy(name, priority=-1) for name, wanted in demand.items() if wanted > 0}
    found = {name: min(demand[name], share) for name, share in guaranteed(slots, known).items()}
    for ceilings in (True, False):
        for priority in sorted({policy.priority for policy in known.values()}, reverse=True):
            room = {
                name: (min(demand[name], slots * policy.ceiling) if ceilings else demand[name]) - found[name]
                for name, policy in known.items()
                if policy.priority == priority
            }
            for name, more in _share_evenly(slots - sum(found.values()), room).items():
                found[name] += more
    return found


def _share_evenly(amount: float, room: Mapping[str, float]) -> dict[str, float]:
    """Max-min fair shares of `amount`, none larger than its room."""
    shares: dict[str, float] = {}
    left = max(0.0, amount)
    ordered = sorted((max(0.0, size), name) for name, size in room.items())
    for number, (size, name) in enumerate(ordered):
        shares[name] = min(size, left / (len(ordered) - number))
        left -= shares[name]
    return shares
