"""Errors of the engine's memory."""

from __future__ import annotations

from npufleet_pod.errors import PodError


class EngineMemoryError(PodError):
    """Base of every error that the engine's memory raises."""


class LayoutError(EngineMemoryError):
    """Sizes that do not go together."""


class OutOfMemoryError(EngineMemoryError):
    """A pool has no free range that is long enough."""


class MemoryStateError(EngineMemoryError):
    """A call that does not fit the state, or bookkeeping that contradicts itself: a defect of the caller or of this package."""


class TierError(EngineMemoryError):
    """A page could not be kept on, or brought back from, a slower tier. The page is computed again; serving goes on."""
