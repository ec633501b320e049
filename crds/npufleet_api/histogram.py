"""A histogram over logarithmic bins: bounded memory, percentiles within a known error. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

GROWTH = 1.04
"""Width of a bin. A percentile is a bin's geometric middle: within sqrt(1.04) - 1 < 2 % of the true value."""
LOWEST = 0.01
HIGHEST = 1e8
_LOG_GROWTH = math.log(GROWTH)
BINS = math.ceil(math.log(HIGHEST / LOWEST) / _LOG_GROWTH) + 1
"""Values below LOWEST share the first bin, values above HIGHEST the last: at most BINS (588) counts, however many values."""


def bin_of(value: float) -> int:
    """Bin of a non-negative value."""
    if value <= LOWEST:
        return 0
    if value >= HIGHEST:
        return BINS - 1
    return min(BINS - 1, math.ceil(math.log(value / LOWEST) / _LOG_GROWTH))


def middle_of(index: int) -> float:
    """The value that stands for a bin."""
    return LOWEST if index == 0 else LOWEST * GROWTH ** (index - 0.5)


def percentiles(histograms: Iterable[dict[int, int]], shares: tuple[float, ...]) -> tuple[float | None, ...]:
    """Nearest-rank percentiles (shares in 0…1, ascending) of all histograms together; None without values."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for index, count in histogram.items():
            total[index] = total.get(index, 0) + count
    number = sum(total.values())
    if number == 0:
        return tuple(None for _ in shares)
    ranks = [max(1, math.ceil(share * number)) for share in shares]
    found: list[float | None] = []
    seen = 0
    for index in sorted(total):
        seen += total[index]
        while len(found) < len(ranks) and seen >= ranks[len(found)]:
            found.append(middle_of(index))
    return tuple(found)
