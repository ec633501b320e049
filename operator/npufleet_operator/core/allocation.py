"""`DynamicResourceAllocator`: who gets NPUs, and from whom they are taken back.

Guarantees first. What they need and is not free is claimed: from what leaves already, otherwise from borrowers. Only what neither
guarantees nor claims need is lent, by priority, up to each class's ceiling. Pure, and independent of the order of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import floor, inf, log2

from npufleet_api.conditions import Reason
from npufleet_api.pool import Borrowing, Rebalancing, Reclaim
from npufleet_operator.core.autoscale.worth import Worth
from npufleet_operator.core.observed import ModelKey, PodView
from npufleet_operator.core.room import Room

CONTEST_RATIO = 1.5
"""What others would gain by a replica must be this many times what its own clients would lose: both are estimates."""
DEFAULT_REBALANCING = Rebalancing()


@dataclass(frozen=True, slots=True)
class ClassAccount:
    """What a class may hold and holds, in NPUs."""

    name: str
    priority: int
    guarantee: int
    """What it is guaranteed now: less than `nominal_guarantee` where failures leave too few NPUs for all."""
    ceiling: int
    charged: int
    nominal_guarantee: int = 0


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
    worth: Worth | None = None
    """What a replica more or fewer is worth to its clients, where that is known."""
    settled: bool = False
    """None of its replicas comes or goes."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A replica that stays, as a possible victim."""

    model: ModelKey
    pod: PodView
    workload_class: str
    npus: int
    node: str
    load: int
    """Requests in flight."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Replicas that a model may start now, and why not more."""

    missing: int = 0
    surge: int = 0
    surge_has_room: bool = False
    """A surge would have its place on a node: only the ceiling is in the way."""
    by_ceiling: bool = False
    by_room: bool = False
    nodes: tuple[str, ...] = ()
    """Where each of them has its place, surges last."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A borrower's replica that is taken back, for whom, and why."""

    holding: Holding
    claimant: ModelKey
    reason: Reason = Reason.RECLAIMED_FOR_GUARANTEE
    why: str = ""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one plan hands out, takes back, and still owes to guarantees."""

    grants: Mapping[ModelKey, Grant]
    victims: tuple[Victim, ...] = ()
    waiting: frozenset[ModelKey] = frozenset()
    """Claimants whose NPUs are on their way: they leave others by this plan or an earlier one."""
    fragmented: frozenset[ModelKey] = frozenset()
    """Claimants for which enough is free or borrowed in sum, but not on one node."""
    denied: frozenset[ModelKey] = frozenset()
    """Claimants for which nothing may be taken back."""

    @property
    def claims(self) -> frozenset[ModelKey]:
        """Models that have not yet what their class is guaranteed."""
        return self.waiting | self.fragmented | self.denied


class DynamicResourceAllocator:
    """One plan's allocation."""

    def __init__(
        self,
        accounts: Mapping[str, ClassAccount],
        room: Room,
        holdings: Sequence[Holding] = (),
        rebalancing: Rebalancing = DEFAULT_REBALANCING,
        losses: Mapping[ModelKey, float] | None = None,
    ) -> None:
        """losses: what a model's clients would lose with one replica, of models of which one may be taken for others to gain."""
        reclaim = rebalancing.reclaim
        self._by_attainment = rebalancing.borrowing is Borrowing.BY_ATTAINMENT
        self._losses = losses or {}
        self._accounts = accounts
        self._room = room
        self._reclaim = reclaim
        self._charged = {name: account.charged for name, account in accounts.items()}
        self._candidates = _candidates(accounts, holdings) if reclaim is Reclaim.BORROWED_ONLY else []
        self._granted: dict[ModelKey, tuple[list[str], list[str]]] = {}
        """Nodes of missing replicas and of surges."""
        self._by_ceiling: set[ModelKey] = set()
        self._by_room: set[ModelKey] = set()
        self._has_room: set[ModelKey] = set()
        self._waiting: set[ModelKey] = set()
        self._fragmented: set[ModelKey] = set()
        self._denied: set[ModelKey] = set()
        self._victims: list[Victim] = []
        self._contested: set[ModelKey] = set()
        """Models whose turn to take from others has come."""
        self._hopeless: int | None = None
        """The smallest claim that could not be met: no larger one is tried."""

    def allocate(self, wants: Sequence[Want]) -> Allocation:
        """Grants and victims. Surges come last: they only speed a rollout up."""
        self._granted = {want.model: ([], []) for want in wants}
        turns = self._turns(wants)
        for want in turns:
            self._give_within_guarantee(want)
        for want in turns:
            self._claim(want)
        self._by_room.clear()
        if self._by_attainment:
            turns.sort(key=_eagerness, reverse=True)
        for want in turns:
            self._lend(want)
        for want in turns:
            self._contest(want)
        for want in sorted(wants, key=lambda w: (-self._accounts[w.workload_class].priority, w.created, w.model)):
            for _ in range(want.surge):
                if not self._give(want, self._accounts[want.workload_class].ceiling, 1) and self._room.fits(want.npus):
                    self._has_room.add(want.model)
        return Allocation(
            grants={want.model: self._grant(want) for want in wants},
            victims=tuple(self._victims),
            waiting=frozenset(self._waiting),
            fragmented=frozenset(self._fragmented),
            denied=frozenset(self._denied),
        )

    def _turns(self, wants: Sequence[Want]) -> list[Want]:
        """One entry per missing replica: classes by priority, within one a replica of each model in turn."""
        members: dict[str, list[Want]] = {}
        for want in wants:
            members.setdefault(want.workload_class, []).append(want)
        turns: list[Want] = []
        for name in sorted(members, key=lambda n: (-self._accounts[n].priority, n)):
            ranked = sorted(((w.held + i, w.created, w.model, w) for w in members[name] for i in range(w.missing)), key=lambda t: t[:3])
            turns += [want for _, _, _, want in ranked]
        return turns

    def _give(self, want: Want, limit: int, part: int) -> bool:
        if self._charged[want.workload_class] + want.npus > limit:
            return False
        node = self._room.take(want.npus)
        if node is None:
            self._by_room.add(want.model)
            return False
        self._charged[want.workload_class] += want.npus
        self._granted[want.model][part].append(node)
        return True

    def _guarantee(self, want: Want) -> int:
        account = self._accounts[want.workload_class]
        return min(account.guarantee, account.ceiling)

    def _give_within_guarantee(self, want: Want) -> None:
        if want.model not in self._by_room:
            self._give(want, self._guarantee(want), 0)

    def _claim(self, want: Want) -> None:
        """One replica of the model, if its class has not what it is guaranteed: one move in flight per claimant."""
        outstanding = want.missing - len(self._granted[want.model][0])
        if outstanding <= 0 or want.model in self._waiting | self._fragmented | self._denied:
            return
        if self._charged[want.workload_class] + want.npus > self._guarantee(want):
            return
        if self._room.claim(want.npus):
            self._waiting.add(want.model)
        elif self._reclaim is not Reclaim.BORROWED_ONLY:
            self._denied.add(want.model)
            return
        elif victims := self._choose(want.npus):
            self._take(want, [Victim(holding, want.model) for holding in victims])
            self._waiting.add(want.model)
        else:
            borrowed = sum(holding.npus for holding in self._candidates)
            (self._fragmented if self._room.in_sum() + borrowed >= want.npus else self._denied).add(want.model)
            return
        self._charged[want.workload_class] += want.npus

    def _take(self, want: Want, victims: Sequence[Victim]) -> None:
        """These replicas go, and what they leave is kept for the want."""
        for victim in victims:
            self._room.expect(victim.holding.node, victim.holding.npus)
        self._victims += victims
        taken = {victim.holding.pod.uid for victim in victims}
        self._candidates = [holding for holding in self._candidates if holding.pod.uid not in taken]
        self._room.claim(want.npus)

    def _contest(self, want: Want) -> None:
        """One replica of a model for which there is no room, from models to whose clients its NPUs are worth less.

        Only from borrowers that miss their promise and rest, and only where the gain is well above the loss: so the sum over all models
        grows with each move, and a constant load comes to rest.
        """
        account = self._accounts[want.workload_class]
        if not self._by_attainment or self._reclaim is not Reclaim.BORROWED_ONLY or want.worth is None or not want.settled:
            return
        if want.model not in self._by_room or want.model in self._contested | self._waiting | self._fragmented | self._denied:
            return
        if self._charged[want.workload_class] + want.npus > account.ceiling or want.worth.gain <= 0:
            return
        self._contested.add(want.model)
        if self._room.claim(want.npus):
            self._charged[want.workload_class] += want.npus
            return
        chosen = self._choose(want.npus, self._cheapest(want))
        loss = sum(self._loss(holding) for holding in chosen)
        if chosen and want.worth.gain > CONTEST_RATIO * loss:
            why = f"its clients lose about {loss:.2g} requests/s within the targets, the others' gain {want.worth.gain:.2g}"
            self._take(want, [Victim(holding, want.model, Reason.WORTH_MORE_ELSEWHERE, why) for holding in chosen])
            self._charged[want.workload_class] += want.npus

    def _loss(self, holding: Holding) -> float:
        return self._losses.get(holding.model, inf)

    def _cheapest(self, want: Want) -> list[Holding]:
        """One borrowed replica of each model that may lose one and loses none yet, by what an NPU of it is worth to its clients."""
        first: dict[ModelKey, Holding] = {}
        losers = {victim.holding.model for victim in self._victims}
        for holding in self._candidates:
            if holding.model != want.model and holding.model not in losers and self._loss(holding) < inf:
                first.setdefault(holding.model, holding)
        return sorted(first.values(), key=lambda h: self._loss(h) / h.npus)

    def _choose(self, npus: int, among: Sequence[Holding] | None = None) -> list[Holding]:
        """The fewest borrowers, in order, whose NPUs make room on one node; none if they cannot. `among` are all, unless given."""
        if among is None and self._hopeless is not None and npus >= self._hopeless:
            return []
        chosen: list[Holding] = []
        on_node: dict[str, int] = {}
        places: set[str] = set()
        freed = 0
        for holding in self._candidates if among is None else among:
            chosen.append(holding)
            freed += holding.npus
            on_node[holding.node] = on_node.get(holding.node, 0) + holding.npus
            if self._room.node_would_fit(npus, holding.node, on_node[holding.node]):
                places.add(holding.node)
            if places and self._room.pool_would_fit(npus, freed):
                return self._needed(npus, min(places), chosen)
        if among is None:
            self._hopeless = npus
        return []

    def _needed(self, npus: int, place: str, chosen: Sequence[Holding]) -> list[Holding]:
        """Without those that turned out unneeded, tried in reverse order."""
        needed = list(chosen)
        for holding in reversed(chosen):
            rest = [h for h in needed if h is not holding]
            there = sum(h.npus for h in rest if h.node == place)
            if self._room.node_would_fit(npus, place, there) and self._room.pool_would_fit(npus, sum(h.npus for h in rest)):
                needed = rest
        return needed

    def _lend(self, want: Want) -> None:
        if len(self._granted[want.model][0]) >= want.missing or want.model in self._by_room:
            return
        if not self._give(want, self._accounts[want.workload_class].ceiling, 0) and want.model not in self._by_room:
            self._by_ceiling.add(want.model)

    def _grant(self, want: Want) -> Grant:
        missing, surge = self._granted[want.model]
        return Grant(
            missing=len(missing),
            surge=len(surge),
            surge_has_room=want.model in self._has_room,
            by_ceiling=want.model in self._by_ceiling,
            by_room=want.model in self._by_room and len(missing) < want.missing,
            nodes=(*missing, *surge),
        )


def _candidates(accounts: Mapping[str, ClassAccount], holdings: Sequence[Holding]) -> list[Holding]:
    """What may be taken back, in order: of classes above their guarantee only, lowest priority, least loaded, newest.

    Protected are the replicas that fit into the class's guarantee, large ones first so that most of it is used, then the busiest and
    oldest: what a class uses of its guarantee is never taken.
    """
    members: dict[str, list[Holding]] = {}
    for holding in holdings:
        members.setdefault(holding.workload_class, []).append(holding)
    candidates: list[Holding] = []
    for name, group in members.items():
        left = accounts[name].guarantee
        for holding in sorted(group, key=lambda h: (-h.npus, *_keep_order(h))):
            if holding.npus <= left:
                left -= holding.npus
            else:
                candidates.append(holding)
    rank = {name: index for index, name in enumerate(sorted(accounts, key=lambda n: (-accounts[n].priority, n)))}
    return sorted(candidates, key=lambda h: (-rank[h.workload_class], *_victim_order(h)))


def _eagerness(want: Want) -> float:
    """How much an NPU would do for the want's clients, in powers of two: those that differ by less come by priority. Whoever wants a fixed
    number, or of whom nothing is known, comes first."""
    if want.worth is None:
        return inf
    return floor(log2(want.worth.gain / want.npus)) if want.worth.gain > 0 else -inf


def _victim_order(h: Holding) -> tuple[bool, int, float, str, str]:
    return (h.pod.engine_ready, h.load, -h.pod.created.timestamp(), h.pod.namespace, h.pod.name)


def _keep_order(h: Holding) -> tuple[bool, int, float, str, str]:
    return (not h.pod.engine_ready, -h.load, h.pod.created.timestamp(), h.pod.namespace, h.pod.name)
