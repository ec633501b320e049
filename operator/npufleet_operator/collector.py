"""Python's garbage collector in a process that plans."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 50)
"""New objects, and collections of each younger generation, before one is collected: a plan of 500 models makes some 50 000 objects."""


def spare_plans_the_collector() -> None:
    """To be called once everything was listed. That lives long, and what a plan makes goes by its reference counts: a collector that walks
    through all of it in the middle of a plan takes longer than the plan."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
