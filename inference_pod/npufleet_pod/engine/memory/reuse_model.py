"""How likely a cached page is used again, by its kind and by the time since its last use. Imports no torch.

A kind is a tuple of features, the most telling first. For each kind and each of its prefixes the model counts, in bins of age, how often
pages of that age were used and how long pages were of that age: uses by exposure are the hazard rate. A kind of which little is known
borrows from its shorter prefix, the shortest from a power law. From the hazards follows a page's value: the largest ratio, over all
times to give up, of the expected hits to the expected time in memory (Gittins' index, which is the optimal order when reuse times are
independent; cf. Ferragut, Rodriguez and Paganini, "Optimal timer-based caching policies for general arrival processes", 2018).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Kind = tuple[int, ...]

AGE_EDGES_SECONDS = (0.0, *(4 * 2 ** (index / 2) for index in range(30)))
"""Where the bins of age begin, up to a day; the last bin is open."""

BINS = len(AGE_EDGES_SECONDS)
PRIOR_EVENTS = 3.0
"""Uses that the borrowed rate counts for: enough to steady a new kind, few enough to let a kind with a dozen uses speak for itself."""
PRIOR_SHAPE = 0.3
"""Hazard at age t before anything is known: 0.3 / (1 s + t). Falling with age, it makes an unlearned model order by recency."""
INHERITANCE = 0.7
"""How far a kind's ratio to its prefix at one age carries over to the next age: 0 not at all, 1 in full."""
RATIO_BOUNDS = (0.1, 10.0)
HALF_LIFE_SECONDS = 6 * 3600.0
"""Time after which what was counted weighs half: habits change over a day."""

_EDGES = np.array(AGE_EDGES_SECONDS)
_WIDTHS = np.append(np.diff(_EDGES), _EDGES[-1])
_MIDDLES = _EDGES + _WIDTHS / 2
_PRIOR = PRIOR_SHAPE / (_EDGES + 1)

Vector = NDArray[np.float64]


class _Counts:
    """Of one prefix of kinds, by bin: uses, finished exposure in seconds, weight now in the bin, and the sum of weight · time of entry."""

    __slots__ = ("entered", "events", "exposure", "present")

    def __init__(self) -> None:
        self.events = [0.0] * BINS
        self.exposure = [0.0] * BINS
        self.present = [0.0] * BINS
        self.entered = [0.0] * BINS


class ReuseModel:
    """Learns from what happens to every page, in memory or evicted: to learn only from the pages it kept would confirm its own choices."""

    def __init__(self) -> None:
        self._counts: dict[Kind, _Counts] = {}
        self._lineages: dict[Kind, tuple[_Counts, ...]] = {}
        self._decayed_at: float | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds that were seen, in the order of their first sight."""
        return tuple(self._lineages)

    def enter(self, kind: Kind, age_bin: int, weight: float, entered_at: float) -> None:
        """Pages of `weight` in all came of that age at time `entered_at` (s)."""
        for counts in self._lineage(kind):
            counts.present[age_bin] += weight
            counts.entered[age_bin] += weight * entered_at

    def leave(self, kind: Kind, age_bin: int, weight: float, entered_at: float, left_at: float, *, used: bool) -> None:
        """They left it: used again, or grown older, or forgotten."""
        seconds = max(0.0, left_at - entered_at) * weight
        for counts in self._lineage(kind):
            counts.present[age_bin] -= weight
            counts.entered[age_bin] -= weight * entered_at
            counts.exposure[age_bin] += seconds
            if used:
                counts.events[age_bin] += weight

    def values(self, kinds: tuple[Kind, ...], now: float) -> list[list[float]]:
        """Expected hits per second of memory, for each kind and bin of age."""
        hazards: dict[Kind, Vector] = {}
        rows = [self._hazard(kind, now, hazards) for kind in kinds]
        return _gittins(np.array(rows)).tolist() if rows else []

    def decay(self, now: float) -> None:
        """Let what was counted lose weight by the time that has passed since the last call."""
        before, self._decayed_at = self._decayed_at, now
        if before is None or now <= before:
            return
        factor = math.exp2((before - now) / HALF_LIFE_SECONDS)
        for counts in self._counts.values():
            counts.events = [value * factor for value in counts.events]
            counts.exposure = [value * factor for value in counts.exposure]

    def _lineage(self, kind: Kind) -> tuple[_Counts, ...]:
        lineage = self._lineages.get(kind)
        if lineage is None:
            prefixes = [kind[:length] for length in range(len(kind) + 1)]
            lineage = self._lineages[kind] = tuple(self._counts.setdefault(prefix, _Counts()) for prefix in prefixes)
        return lineage

    def _hazard(self, kind: Kind, now: float, known: dict[Kind, Vector]) -> Vector:
        found = known.get(kind)
        if found is not None:
            return found
        parent = self._hazard(kind[:-1], now, known) if kind else None
        counts = self._counts.get(kind)
        if counts is None:
            return _PRIOR if parent is None else parent
        running = np.maximum(0.0, np.array(counts.present) * now - np.array(counts.entered))
        events = (np.array(counts.events) + PRIOR_EVENTS).tolist()
        exposure = (np.array(counts.exposure) + running).tolist()
        rates = [0.0] * BINS
        low, high = RATIO_BOUNDS
        ratio = 1.0
        for index in range(BINS):
            if parent is not None:
                expected = parent[index] * ratio
            elif index:
                # Where old pages are rare, their rate continues the fall of what was measured at younger ages. A fixed prior would
                # rate an old page above a younger one of which it is known that it is hardly ever used.
                expected = min(_PRIOR[index], rates[index - 1] * _MIDDLES[index - 1] / _MIDDLES[index])
            else:
                expected = _PRIOR[0]
            rates[index] = events[index] / (exposure[index] + PRIOR_EVENTS / expected)
            if parent is not None:
                ratio = min(max((rates[index] / parent[index]) ** INHERITANCE, low), high)
        result = known[kind] = np.array(rates)
        return result


def _gittins(hazards: Vector) -> Vector:
    """Largest ratio of expected uses to expected seconds from the start of each bin, over all later bins to stop after. (kinds, bins)."""
    used = -np.expm1(-hazards * _WIDTHS)
    seconds = used / hazards
    best = np.zeros_like(hazards)
    alive = np.ones_like(hazards)
    hits = np.zeros_like(hazards)
    time = np.zeros_like(hazards)
    for ahead in range(BINS):
        span = BINS - ahead
        hits[:, :span] += alive[:, :span] * used[:, ahead:]
        time[:, :span] += alive[:, :span] * seconds[:, ahead:]
        alive[:, :span] *= 1 - used[:, ahead:]
        np.maximum(best[:, :span], hits[:, :span] / time[:, :span], out=best[:, :span])
    return best
