"""What a replica's requests would see at the present load, or at a multiple of it: from its own measurements and its utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt

from npufleet_api.model import Slo
from npufleet_operator.core.autoscale.signals import ReplicaSignals, Signals

MARGIN = 0.8
"""What is left after a removal must stay below this share of every target and of every resource (NVIDIA Dynamo's planner keeps the
same margin before it consolidates)."""
FULL = 0.95
"""A KV cache in use beyond this makes requests wait for memory."""

SPREAD = 2.0
"""Standard deviations that the number of requests at one moment is allowed."""
MOST_HEADROOM = 16.0
"""Beyond sixteen times the present load nothing is predicted."""


def predicted_ttft_ms(r: ReplicaSignals, ratio: float = 1.0) -> float:
    """Time to first token at `ratio` times the present load; 0 where nothing was measured.

    Waiting requests are served in turns of what runs now. More load stretches waiting as in a single queue with utilisation u (M/M/1):
    by (1 - u) / (1 - u * ratio).
    """
    known = r.ttft_p95_ms or 0.0
    if r.waiting:
        known = max(known, (r.ttft_p50_ms or r.ttft_p95_ms or 0.0) * (1 + r.waiting / max(1, r.running)))
    if ratio <= 1 or known == 0:
        return known
    use = utilisation(r)
    return inf if use * ratio >= 1 else known * (1 - use) / (1 - use * ratio)


def predicted_tpot_ms(r: ReplicaSignals, ratio: float = 1.0) -> float:
    """Time per output token at `ratio` times the present load; 0 where nothing was measured. A step's time grows with the batch, at most
    in proportion: part of it, reading the weights, does not grow at all."""
    return (r.tpot_p95_ms or 0.0) * max(1.0, ratio)


def utilisation(r: ReplicaSignals) -> float:
    """The share in use of what runs out first, from 0 to 1; 0 where nothing is told."""
    return min(1.0, max(r.compute or 0.0, r.kv_cache or 0.0))


def misses(r: ReplicaSignals, slo: Slo | None, ratio: float = 1.0, margin: float = 1.0) -> bool:
    """Whether a target would be missed, less a margin. Without targets: whether requests wait, or the KV cache is full."""
    if slo is None or (slo.ttft_milliseconds is None and slo.tpot_milliseconds is None):
        return r.waiting > 0 or (r.kv_cache or 0.0) * ratio > FULL * margin
    if slo.ttft_milliseconds is not None and predicted_ttft_ms(r, ratio) > slo.ttft_milliseconds * margin:
        return True
    return slo.tpot_milliseconds is not None and predicted_tpot_ms(r, ratio) > slo.tpot_milliseconds * margin


def measured(r: ReplicaSignals, slo: Slo | None) -> bool:
    """Whether what the targets speak of was measured on the replica. Without targets nothing needs to be."""
    return slo is None or (
        (slo.ttft_milliseconds is None or r.ttft_p95_ms is not None) and (slo.tpot_milliseconds is None or r.tpot_p95_ms is not None)
    )


def headroom(replicas: Sequence[ReplicaSignals], slo: Slo | None) -> float:
    """How many times the present load these replicas carry with margin, from 1 to `MOST_HEADROOM`; 1 where too little is known."""
    busy = [r for r in replicas if r.running]
    if not busy or not all(measured(r, slo) and r.compute is not None and r.kv_cache is not None for r in busy):
        return 1.0
    return min(MOST_HEADROOM, *(max(1.0, _headroom(r, slo)) for r in busy))


def _headroom(r: ReplicaSignals, slo: Slo | None) -> float:
    """The ratio at which the first of `_too_much`'s limits is met; below 1 where one is passed already."""
    limits = [MARGIN / share for share in (r.kv_cache, r.compute) if share]
    if slo is None or (slo.ttft_milliseconds is None and slo.tpot_milliseconds is None):
        return 0.0 if r.waiting else min(limits, default=MOST_HEADROOM)
    if slo.tpot_milliseconds is not None and (tpot := predicted_tpot_ms(r)):
        limits.append(MARGIN * slo.tpot_milliseconds / tpot)
    if slo.ttft_milliseconds is not None and (ttft := predicted_ttft_ms(r)):
        use, target = utilisation(r), MARGIN * slo.ttft_milliseconds
        if use:
            limits.append((1 - ttft * (1 - use) / target) / use)
        elif ttft > target:
            return 0.0
    return min(limits, default=MOST_HEADROOM)


def _too_much(replicas: Sequence[ReplicaSignals], ratio: float, slo: Slo | None) -> str:
    """What would be in the way at `ratio` times the present load: a target or a resource, with margin."""
    for r in replicas:
        for name, share in (("KV cache", r.kv_cache), ("compute", r.compute)):
            if share is not None and share * ratio > MARGIN:
                return f"{name} would be at {100 * share * ratio:.0f} %, above {100 * MARGIN:.0f} %"
        if misses(r, slo, ratio, MARGIN):
            return (
                f"TTFT would be {predicted_ttft_ms(r, ratio):.0f} ms and TPOT {predicted_tpot_ms(r, ratio):.0f} ms: "
                f"within {100 * (1 - MARGIN):.0f} % of a target"
            )
    return ""


def at_its_worst(r: ReplicaSignals, s: Signals) -> ReplicaSignals:
    """As it may be within minutes: with the latencies that clients saw in the gateways' own window, and with the KV cache that is in use
    when as many requests come together as seldom do. It is what a few requests hold at one moment; their number spreads by its square
    root (Poisson)."""
    running = sum(other.running for other in s.replicas)
    return replace(
        r,
        ttft_p95_ms=max((x for x in (r.ttft_p95_ms, s.ttft_p95_ms) if x is not None), default=None),
        tpot_p95_ms=max((x for x in (r.tpot_p95_ms, s.tpot_p95_ms) if x is not None), default=None),
        kv_cache=min(1.0, r.kv_cache * (1 + SPREAD / sqrt(running))) if r.kv_cache is not None and running else r.kv_cache,
    )


def unsafe_to_remove(replicas: Sequence[ReplicaSignals], ready: int, left: int, slo: Slo | None) -> str:
    """Why `left` replicas would be too few for what `ready` of them carry now, or nothing where they can: load * ready / left must meet
    every target and fit KV cache and compute, with margin, on every replica."""
    if left < 1:
        busy = sum(r.in_flight + r.running + r.waiting for r in replicas)
        return "" if busy == 0 else "the only replica has requests"
    why = _too_much(replicas, max(1.0, ready / left), slo)
    return f"with {left} replica(s) {why}" if why else ""
