"""How long to wait before a restart."""

from __future__ import annotations

_FIRST_SECONDS = 0.2
_MAX_SECONDS = 10.0
_STEADY_SECONDS = 30.0


class Backoff:
    """Doubles from 0.2 s to 10 s; starts over once a process has lived for 30 s."""

    def __init__(self) -> None:
        self._next_seconds = _FIRST_SECONDS

    def after(self, lived_seconds: float) -> float:
        """Seconds to wait before restarting a process that lived this long."""
        if lived_seconds >= _STEADY_SECONDS:
            self._next_seconds = _FIRST_SECONDS
        delay = self._next_seconds
        self._next_seconds = min(2 * delay, _MAX_SECONDS)
        return delay
