"""How many requests a model's replicas take at once. Pure.

The engine's own limit where its monitor reports it. Else it is learned: while requests wait in an engine, what it runs is all it can run;
the estimate falls towards that by an eighth a report, so that one report taken at an odd moment does not throttle a replica.
"""

from __future__ import annotations

from npufleet_api.report import EngineFigures

FALL = 0.875
SLACK_DIVISOR = 16
"""A replica is sent a sixteenth more than it runs, and one at least: an engine whose queue is empty has a gap in its batch."""


def next_estimate(figures: EngineFigures | None, before: float | None, fallback: int) -> float:
    """Requests that a replica runs at once, after another report (None: there is none); `before` is the estimate so far."""
    estimate = float(fallback) if before is None else before
    if figures is None:
        return estimate
    if figures.max_running:
        return float(figures.max_running)
    if figures.waiting > 0 and figures.running > 0:
        return max(float(figures.running), estimate * FALL)
    return max(estimate, float(figures.running))


def with_slack(estimate: float) -> float:
    """Requests that a replica is sent."""
    return estimate + max(1.0, estimate / SLACK_DIVISOR)
