"""Forecast of a series by exponential smoothing, written plainly: level, damped trend and, where two seasons are known, a season.

Holt (1957) and Winters (1960), with the damped trend of Gardner and McKenzie (1985); additive form, as in Hyndman and Athanasopoulos,
Forecasting: Principles and Practice, chapter 8.
"""

from __future__ import annotations

from collections.abc import Sequence

LEVEL = 0.5
TREND = 0.2
SEASON = 0.3
DAMPING = 0.9
"""Smoothing weights for series of minutes: half of the news is believed at once; a trend fades within about ten steps."""
GROWTH_LIMIT = 2.0
"""No forecast goes beyond this many times the highest value seen: a trend is a hint, not a promise."""


def forecast(series: Sequence[float], steps: int, season: int = 0) -> float:
    """The highest value expected within `steps` steps after the series, never negative; 0 for an empty series.

    `season` is the season's length in steps; it is used once two seasons are known.
    """
    if not series:
        return 0.0
    seasonal = _first_season(series, season) if season > 1 and len(series) >= 2 * season else [0.0]
    length = len(seasonal)
    level, trend = series[0] - seasonal[0], 0.0
    for index, value in enumerate(series[1:], start=1):
        turn = index % length
        before = level
        level = LEVEL * (value - seasonal[turn]) + (1 - LEVEL) * (level + DAMPING * trend)
        trend = TREND * (level - before) + (1 - TREND) * DAMPING * trend
        if length > 1:
            seasonal[turn] = SEASON * (value - level) + (1 - SEASON) * seasonal[turn]
    highest = 0.0
    damped = 0.0
    for step in range(1, max(1, steps) + 1):
        damped += DAMPING**step
        highest = max(highest, level + damped * trend + seasonal[(len(series) - 1 + step) % length])
    return max(0.0, min(highest, GROWTH_LIMIT * max(series)))


def _first_season(series: Sequence[float], season: int) -> list[float]:
    """How far each step of the first two seasons lies from their mean."""
    mean = sum(series[: 2 * season]) / (2 * season)
    return [(series[i] + series[i + season]) / 2 - mean for i in range(season)]
