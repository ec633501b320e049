"""Sums and joins over ranks of one host through memory that all of them map.

Every element is added up in the order of the ranks, by whichever route: what a sum gives does not depend on how many elements are added
beside it, and so an answer not on the batch that it was computed in. A ring, as Gloo's, begins each part of a message at another rank.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npufleet_pod.engine.distributed.communication import Route
from npufleet_pod.engine.distributed.wiring import Wiring
from npufleet_pod.engine.memory.shared import SharedRegion
from npufleet_pod.errors import ExchangeError

SLOT_BYTES = 1024 * 1024
"""What a rank shows the others at once; longer messages take several turns."""
TURNS = 2
"""Slots of a rank, used in turn: when one is written again, all ranks have met since it was read."""
WAIT_MILLISECONDS = 100
"""How often a rank that waits looks whether the others have been given up."""


class SharedExchange:
    """One rank's end of the shared memory."""

    def __init__(self, rank: int, ranks: int, wiring: Wiring, given_up: Callable[[], bool]) -> None:
        """given_up: whether a rank has failed, so that waiting for it is in vain."""
        self._rank = rank
        self._ranks = ranks
        self._given_up = given_up
        region = SharedRegion(wiring.exchange, TURNS * (ranks + 1) * SLOT_BYTES)
        whole = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self._slots = whole[: TURNS * ranks * SLOT_BYTES].view(TURNS, ranks, SLOT_BYTES)
        self._sums = whole[TURNS * ranks * SLOT_BYTES :].view(TURNS, SLOT_BYTES)
        others = [other for other in range(ranks) if other != rank]
        self._out = [wiring.signals[rank][other] for other in others]
        self._in = [(wiring.signals[other][rank], select.poll()) for other in others]
        for descriptor, poll in self._in:
            poll.register(descriptor, select.POLLIN)
        self._turn = 0

    def all_reduce(self, tensor: Tensor, route: Route) -> Tensor:
        """The sum of every rank's `tensor`, written over it. Half-width numbers are added in float32. Raises ExchangeError."""
        flat = tensor.view(-1)
        step = SLOT_BYTES // tensor.element_size()
        for start in range(0, flat.shape[0], step):
            piece = flat[start : start + step]
            if route is Route.DIRECT:
                self._sum_whole(piece)
            else:
                self._sum_segment(piece)
        return tensor

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """On rank 0 every rank's `tensor` (N, sizes[rank]) side by side; the others get their own back. Raises ExchangeError."""
        rows, widest, fit = tensor.shape[0], max(sizes), SLOT_BYTES // tensor.element_size()
        starts = [sum(sizes[:rank]) for rank in range(self._ranks)]
        whole = tensor.new_empty((rows, sum(sizes))) if self._rank == 0 else tensor
        columns = min(widest, fit)
        for row in range(0, rows, fit // columns):
            for column in range(0, widest, columns):
                self._show(tensor[row : row + fit // columns, column : column + columns])
                if self._rank == 0:
                    for rank, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                        piece = whole[row : row + fit // columns, start : start + size][:, column : column + columns]
                        piece.copy_(self._shown(rank, piece))
                self._turn = 1 - self._turn
        return whole

    def _sum_whole(self, piece: Tensor) -> None:
        self._show(piece)
        _add_up([self._shown(rank, piece) for rank in range(self._ranks)], piece)
        self._turn = 1 - self._turn

    def _sum_segment(self, piece: Tensor) -> None:
        self._show(piece)
        count = piece.shape[0]
        own = slice(count * self._rank // self._ranks, count * (self._rank + 1) // self._ranks)
        sums = _as(self._sums[self._turn], piece)
        _add_up([self._shown(rank, piece)[own] for rank in range(self._ranks)], sums[own])
        self._meet()
        piece.copy_(sums)
        self._turn = 1 - self._turn

    def _show(self, piece: Tensor) -> None:
        """Give the others a piece, and wait until each has given its own."""
        self._shown(self._rank, piece).copy_(piece)
        self._meet()

    def _shown(self, rank: int, like: Tensor) -> Tensor:
        return _as(self._slots[self._turn, rank], like)

    def _meet(self) -> None:
        """Wait for all ranks. The kernel's counters order what was written before with what is read after."""
        for descriptor in self._out:
            os.eventfd_write(descriptor, 1)
        for descriptor, poll in self._in:
            while True:
                try:
                    os.eventfd_read(descriptor)
                    break
                except BlockingIOError:
                    if not poll.poll(WAIT_MILLISECONDS) and self._given_up():
                        raise ExchangeError("exchange between ranks: a rank has failed") from None


def _as(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of a slot in the shape and type of `like`."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


def _add_up(parts: Sequence[Tensor], into: Tensor) -> None:
    """The sum in the order of `parts`."""
    if len(parts) == 2 or into.dtype is torch.float32:
        torch.add(parts[0], parts[1], out=into)
        for part in parts[2:]:
            into.add_(part)
        return
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total.add_(part)
    into.copy_(total)
