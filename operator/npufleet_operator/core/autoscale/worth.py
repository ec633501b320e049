"""What one more replica of a model would bring, and what one fewer would cost, in requests per second within their targets.

The basis on which NPUs beyond guarantees are divided: no model is asked how many it wants, only how much good one NPU does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from npufleet_api.model import AttainedAt, Slo
from npufleet_operator.core.autoscale.signals import ReplicaSignals, Signals
from npufleet_operator.core.measured import round_figure

STEEPNESS = 2.0
"""The odds of a miss fall with this power of the number of replicas: a logistic curve over the logarithm of capacity, laid through what is
measured now. Where requests come in bursts the power lies between 1.5 and 3 (recorded traces of conversations and of code completions)."""
TOLERANCE = 0.1
"""So many more requests in flight than are carried are no shortage: they come and go (the tolerance of HorizontalPodAutoscaler)."""
DEAD_ZONE = 0.02
"""A replica that would bring less than this share of a model's requests within their targets is not worth a move."""

SAME_LOAD = 0.25
"""Requests judged per second that differ by less than this share are the same load."""
MOST_KNOWN = 8


@dataclass(frozen=True, slots=True)
class Worth:
    """Requests per second that would come within their targets, or fall out of them."""

    gain: float
    """With one replica more; where many are short, each one's part of what all of them would bring."""
    loss: float
    """With one replica fewer; infinite where none may be taken: the promise is kept, too little is known, or it is the last."""


def worth(s: Signals, slo: Slo | None, known: Sequence[AttainedAt] = ()) -> Worth | None:
    """None where nothing is known of what clients get. `known` is what they got from other numbers of replicas.

    A model without an SLO promises nothing: it borrows what others leave.
    """
    if slo is None and s.ready:
        return Worth(gain=0.0, loss=inf if s.ready == 1 else 0.0)
    attained, n = _attained(s), s.ready
    if attained is None or slo is None:
        return None
    seen = {a.replicas: a.percent / 100 for a in known if _same_load(a, s)}
    short = max(0, needed(s.replicas, s.in_flight, slo) - n)
    more, fewer = _at(attained, n, n + 1) - attained, attained - _at(attained, n, n - 1)
    if short:
        # They are worth most together: each is valued as its part of the way to a promise that is kept.
        more = max(more, (1 - attained) / short)
        fewer = max(fewer, (1 - attained) / (short + 1))
    # What was measured is believed, but not that more replicas do harm: so a move that did no good is not made the other way again.
    if n + 1 in seen:
        more = max(0.0, seen[n + 1] - attained)
    if n - 1 in seen:
        fewer = max(fewer, attained - seen[n - 1])
    kept = 100 * attained >= slo.attainment_percent
    return Worth(
        gain=s.judged_per_second * more if more >= DEAD_ZONE else 0.0,
        loss=inf if kept or n == 1 else s.judged_per_second * fewer,
    )


def remember(known: Sequence[AttainedAt], s: Signals) -> list[AttainedAt]:
    """`known` with what clients get now from the replicas that are ready, where enough were judged."""
    attained = _attained(s)
    if attained is None:
        return list(known)
    now = AttainedAt(replicas=s.ready, percent=round(100 * attained), requests_per_minute=round_figure(60 * s.judged_per_second))
    return [*(a for a in known if a.replicas != s.ready), now][-MOST_KNOWN:]


def _attained(s: Signals) -> float | None:
    """The better of what clients got lately and over minutes; None where too few requests were judged, or no replica is ready."""
    return None if s.attainment is None or s.lasting is None or s.ready < 1 else max(s.attainment, s.lasting)


def _same_load(a: AttainedAt, s: Signals) -> bool:
    return abs(60 * s.judged_per_second - a.requests_per_minute) <= SAME_LOAD * a.requests_per_minute


def needed(replicas: Sequence[ReplicaSignals], in_flight: int, slo: Slo | None) -> int:
    """Replicas for the requests in flight where all that report are overloaded: requests wait, or each token takes too long. 0 elsewhere.

    One carries what it runs, fewer where that is too many for its time per token.
    """
    target = slo.tpot_milliseconds if slo else None
    slow = [target is not None and (r.tpot_p95_ms or 0.0) > target for r in replicas]
    if not replicas or not all(r.waiting or late for r, late in zip(replicas, slow, strict=True)):
        return 0
    carried = 0.0
    for r in replicas:
        stretch = target / r.tpot_p95_ms if target is not None and r.tpot_p95_ms else 1.0
        carried += r.running * min(1.0, stretch)
    replicas_needed = in_flight * len(replicas) / carried if carried else 0.0
    return ceil(replicas_needed) if replicas_needed > len(replicas) * (1 + TOLERANCE) else 0


def _at(attained: float, n: int, other: int) -> float:
    """The share within targets at another number of replicas."""
    if other < 1 or attained <= 0:
        return 0.0
    odds = (1 - attained) / attained * float((n / other) ** STEEPNESS)
    return 1 / (1 + odds)
