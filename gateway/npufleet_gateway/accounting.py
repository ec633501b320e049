"""Traffic of all models, each in its sliding window. Pure but for an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Collection

from npufleet_api.slo import Exchange, Judgement, SloTargets
from npufleet_api.traffic import WINDOW_SECONDS, TrafficSummary, TrafficWindow
from npufleet_gateway.routing import ModelKey


class Accounting:
    """The windows of all models."""

    def __init__(self, clock: Callable[[], float], window_seconds: float = WINDOW_SECONDS) -> None:
        self._clock = clock
        self._window_seconds = window_seconds
        self._windows: dict[ModelKey, TrafficWindow] = {}

    def started(self, key: ModelKey) -> None:
        """A request for a model arrived."""
        self._window(key).in_flight += 1

    def finished(self, key: ModelKey, exchange: Exchange, targets: SloTargets) -> Judgement:
        """A request that was started has ended."""
        window = self._window(key)
        window.in_flight = max(0, window.in_flight - 1)
        return window.record(exchange, targets, self._clock())

    def summary(self, key: ModelKey) -> TrafficSummary:
        """A model's window; an empty one if it had no traffic."""
        window = self._windows.get(key)
        return window.summary(self._clock()) if window else TrafficSummary(self._window_seconds)

    def retain(self, keys: Collection[ModelKey]) -> None:
        """Forget models that are gone and have nothing in flight."""
        self._windows = {key: window for key, window in self._windows.items() if window.in_flight or key in keys}

    def _window(self, key: ModelKey) -> TrafficWindow:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = TrafficWindow(self._window_seconds)
        return window
