"""Repeats pieces of work in turns, so that whatever else a machine does hits all of them alike. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")

SHORT_SECONDS = 0.2
"""Work that takes less than this in all its repeats is repeated up to MORE times as often: a short piece is easily hit by others' work."""
MORE = 10


def in_turns(
    work: Mapping[Name, Callable[[], float]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Name, list[float]]:
    """Call each piece `repeats` times or more, one after the other in each round; returns what each call returned.

    A round before the first is not counted: it is for what a device prepares once.
    """
    results: dict[Name, list[float]] = {name: [] for name in work}
    for piece in work.values():
        piece()
    began, rounds = clock(), 0
    while rounds < repeats or (rounds < MORE * repeats and clock() - began < SHORT_SECONDS * len(work)):
        for name, piece in work.items():
            results[name].append(piece())
        rounds += 1
    return results
