"""The descriptors by which the ranks of one host share memory and wake each other: made by rank 0, inherited by the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from npufleet_pod.engine.memory.shared import create_shared

SIGNAL_FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE


@dataclass(frozen=True, slots=True)
class Wiring:
    """progress, host, exchange: shared memory. signals[sender][receiver]: an event counter; nothing where both are the same rank."""

    progress: int
    """How far each rank has come."""
    host: int
    """Pages of KV that left the devices."""
    exchange: int
    """What ranks on CPUs add up."""
    signals: tuple[tuple[int, ...], ...]

    @classmethod
    def create(cls, ranks: int) -> Self:
        """For ranks of one host."""
        progress, host, exchange = (create_shared(f"npufleet-{name}") for name in ("progress", "kv-host", "exchange"))
        signals = tuple(tuple(os.eventfd(0, SIGNAL_FLAGS) if one != other else -1 for other in range(ranks)) for one in range(ranks))
        return cls(progress, host, exchange, signals)

    @classmethod
    def parse(cls, numbers: Sequence[int], ranks: int) -> Self:
        """What `numbers` gave in another process."""
        progress, host, exchange, *rest = numbers
        return cls(progress, host, exchange, tuple(tuple(rest[start : start + ranks]) for start in range(0, ranks * ranks, ranks)))

    def numbers(self) -> list[int]:
        """All of them, in an order that `parse` knows."""
        return [self.progress, self.host, self.exchange, *(number for row in self.signals for number in row)]

    def close(self) -> None:
        """Close them here; what is mapped stays."""
        for number in self.numbers():
            if number >= 0:
                os.close(number)
