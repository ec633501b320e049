"""How far each rank has come, in memory that all share, so that one that hangs is known by what it does not do. Imports no torch."""

from __future__ import annotations

from npufleet_pod.engine.memory.shared import SharedRegion

CELL_BYTES = 64
"""A cache line for each rank, so that counting does not slow the others down."""


class Progress:
    """One counter per rank, which only that rank moves: once per layer while it loads, twice per exchange, before and after it.

    All ranks do the same, so that whose counter is behind is the one that the others wait for.
    """

    def __init__(self, descriptor: int, ranks: int, rank: int) -> None:
        """descriptor: of shared memory (`create_shared`), the same for all ranks."""
        self._cells = SharedRegion(descriptor, (ranks + 1) * CELL_BYTES).buffer.cast("q")
        self._own = rank * CELL_BYTES // 8
        self._ranks = ranks

    def advance(self) -> None:
        """This rank has come one thing further."""
        self._cells[self._own] += 1

    def give_up(self) -> None:
        """A rank has failed: nobody is to wait for it."""
        self._cells[self._ranks * CELL_BYTES // 8] = 1

    def given_up(self) -> bool:
        """Whether a rank has failed."""
        return bool(self._cells[self._ranks * CELL_BYTES // 8])

    def counts(self) -> tuple[int, ...]:
        """How far each rank has come; equal where all wait in the same place."""
        return tuple(self._cells[rank * CELL_BYTES // 8] for rank in range(self._ranks))
