"""What was asked of a model over the last day, for forecasts. Pure; memory is bounded.

Stretches begin at multiples of their length in Unix time, so that those of several gateways can be added up.
"""

from __future__ import annotations

from collections import deque

from npufleet_api.report import TrafficBucket, TrafficHistory

STRETCH_SECONDS = 300
STRETCHES = 288
"""A day."""
MAX_COUNT = 10**15
"""What a report may hold: token counts are the engines' word."""


class _Stretch:
    __slots__ = ("arrivals", "generated_tokens", "number", "prompt_tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrivals = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0


class History:
    """One model's. Stretches without a request take no memory. A clock that went back counts into the latest stretch."""

    def __init__(self) -> None:
        self._stretches: deque[_Stretch] = deque(maxlen=STRETCHES + 1)
        self._rendered: tuple[int, TrafficHistory] | None = None

    def arrived(self, time_unix: float) -> None:
        """A request arrived."""
        number = int(time_unix // STRETCH_SECONDS)
        if not self._stretches or self._stretches[-1].number < number:
            self._stretches.append(_Stretch(number))
        self._stretches[-1].arrivals += 1

    def ended(self, arrived_unix: float, prompt_tokens: int, generated_tokens: int) -> None:
        """The request that arrived then has ended with so many tokens."""
        number = int(arrived_unix // STRETCH_SECONDS)
        for stretch in reversed(self._stretches):
            if stretch.number <= number:
                stretch.prompt_tokens += prompt_tokens
                stretch.generated_tokens += generated_tokens
                break

    def render(self, time_unix: float) -> TrafficHistory | None:
        """The whole stretches up to now, from the first with a request; None without any. The tokens of requests that still run are not in
        it.
        """
        end = int(time_unix // STRETCH_SECONDS)
        if self._rendered is not None and self._rendered[0] == end:
            return self._rendered[1]
        past = {stretch.number: stretch for stretch in self._stretches if end - STRETCHES <= stretch.number < end}
        if not past:
            return None
        nothing = TrafficBucket()
        history = TrafficHistory(
            bucket_seconds=STRETCH_SECONDS,
            end_unix=end * STRETCH_SECONDS,
            buckets=[_bucket(past[number]) if number in past else nothing for number in range(min(past), end)],
        )
        self._rendered = (end, history)
        return history


def _bucket(stretch: _Stretch) -> TrafficBucket:
    return TrafficBucket(
        arrivals=min(MAX_COUNT, stretch.arrivals),
        prompt_tokens=min(MAX_COUNT, stretch.prompt_tokens),
        generated_tokens=min(MAX_COUNT, stretch.generated_tokens),
    )
