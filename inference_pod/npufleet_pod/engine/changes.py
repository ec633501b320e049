"""What the engine tells its runner between steps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_pod.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Added:
    """A request that steps may hold from now on; `seed` is used unless it brings its own."""

    request: GenerationRequest
    seed: int


Change = Added | str
"""A request that comes, or the id of one that no later step holds."""
