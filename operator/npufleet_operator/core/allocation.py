"""Who gets free NPUs: guarantees first, then by priority up to each class's ceiling, one replica of each model in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from npufleet_operator.core.capacity import Room
from npufleet_operator.core.observed import ModelKey


@dataclass(frozen=True, slots=True)
class ClassAccount:
    """What a class may hold and holds, in NPUs."""

    name: str
    priority: int
    guarantee: int
    ceiling: int
    charged: int


@dataclass(frozen=True, slots=True)
class Want:
    """Replicas that one model would start now."""

    model: ModelKey
    created: datetime
    workload_class: str
    npus: int
    held: int
    """Replicas that the model has: a model with none comes before one with some."""
    missing: int
    surge: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Replicas that a model may start now, and why not more."""

    missing: int = 0
    surge: int = 0
    surge_has_room: bool = False
    """A surge would have its place on a node: only the ceiling is in the way."""
    by_ceiling: bool = False
    by_room: bool = False


def allocate(wants: Sequence[Want], accounts: Mapping[str, ClassAccount], room: Room) -> dict[ModelKey, Grant]:
    """Grants by model. The result does not depend on the order of `wants`. Surges come last: they only speed a rollout up."""
    charged = {name: account.charged for name, account in accounts.items()}
    granted: dict[ModelKey, list[int]] = {want.model: [0, 0] for want in wants}
    by_ceiling: set[ModelKey] = set()
    by_room: set[ModelKey] = set()
    has_room: set[ModelKey] = set()

    def give(want: Want, limit: int, part: int) -> bool:
        if charged[want.workload_class] + want.npus > limit:
            return False
        if not room.take(want.npus):
            by_room.add(want.model)
            return False
        charged[want.workload_class] += want.npus
        granted[want.model][part] += 1
        return True

    for within_guarantee in (True, False):
        for name in sorted(accounts, key=lambda n: (-accounts[n].priority, n)):
            account = accounts[name]
            limit = min(account.guarantee, account.ceiling) if within_guarantee else account.ceiling
            members = [want for want in wants if want.workload_class == name]
            turns = sorted((want.held + i, want.created, want.model, want) for want in members for i in range(want.missing))
            for _, _, _, want in turns:
                if granted[want.model][0] >= want.missing or want.model in by_room or give(want, limit, 0):
                    continue
                if not within_guarantee and want.model not in by_room:
                    by_ceiling.add(want.model)
    for want in sorted(wants, key=lambda w: (-accounts[w.workload_class].priority, w.created, w.model)):
        for _ in range(want.surge):
            if not give(want, accounts[want.workload_class].ceiling, 1) and room.fits(want.npus):
                has_room.add(want.model)
    return {
        want.model: Grant(
            missing=granted[want.model][0],
            surge=granted[want.model][1],
            surge_has_room=want.model in has_room,
            by_ceiling=want.model in by_ceiling,
            by_room=want.model in by_room and granted[want.model][0] < want.missing,
        )
        for want in wants
    }
