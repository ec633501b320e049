"""Which cached models go when a new one needs their room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npufleet_fetch.errors import CacheFullError

GRACE_SECONDS = 900.0
"""A model that was used so recently stays: its engine may be about to start and not hold it yet."""


@dataclass(frozen=True, slots=True)
class Held:
    """A cached model, complete or not."""

    name: str
    bytes: int
    used: float
    """When it was last fetched or hit, in seconds of the clock that `now` is of."""
    busy: bool
    """An engine, or another fetch, holds it."""


def choose_victims(held: Sequence[Held], need: int, limit: int | None, free: int, now: float) -> tuple[Held, ...]:
    """The longest unused models that have to go so that `need` bytes fit within `limit` and the disk's `free` bytes.

    Raises CacheFullError where not even all that may go is enough.
    """
    used = sum(one.bytes for one in held)
    short = max(need - free, 0 if limit is None else used + need - limit)
    if short <= 0:
        return ()
    victims = []
    for one in sorted((h for h in held if not h.busy and now - h.used >= GRACE_SECONDS), key=lambda h: (h.used, h.name)):
        victims.append(one)
        short -= one.bytes
        if short <= 0:
            return tuple(victims)
    kept = ", ".join(sorted(h.name for h in held if h not in victims)[:5]) or "none"
    bound = "no limit" if limit is None else f"a limit of {limit >> 20} MiB"
    raise CacheFullError(
        f"the model needs {need >> 20} MiB, the cache has {bound} and {free >> 20} MiB of free disk, and models in use stay ({kept}): "
        "raise spec.models.cache.sizeLimitGi of the pool, enlarge the disk, or run fewer models on this node"
    )
