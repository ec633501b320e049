"""A rank other than 0: loads its part of the model, and does what rank 0 says until that closes the channel. The process's entry point."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from npufleet_pod.engine.device_choice import open_device
from npufleet_pod.engine.distributed.messages import (
    AttachHost,
    CacheTaken,
    Close,
    Compute,
    Connect,
    Connected,
    Done,
    Failed,
    Loaded,
    Order,
    Prepare,
    Score,
    Start,
    TakeCache,
)
from npufleet_pod.engine.distributed.process import EXIT_SECONDS
from npufleet_pod.engine.distributed.progress import Progress
from npufleet_pod.engine.distributed.wiring import Wiring
from npufleet_pod.engine.memory.errors import EngineMemoryError
from npufleet_pod.engine.memory.shared import SharedRegion
from npufleet_pod.errors import DeviceError, ExchangeError, StartError, one_line

if TYPE_CHECKING:
    from torch import Tensor

    from npufleet_pod.engine.rank import PreparedStep

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that this process gets when the thread that started it ends."""


class Worker:
    """Obeys the orders of one channel, in order."""

    def __init__(self, channel: Connection, progress: Progress, wiring: Wiring, start: Start) -> None:
        """Loads the rank's part. Raises StartError."""
        # Once the parent is known to live; torch is slow to import, and rank 0 waits for all.
        from npufleet_pod.engine.distributed.collective import SmartAllReduce
        from npufleet_pod.engine.rank_loading import load_part

        self._channel = channel
        self._progress = progress
        self._host = wiring.host
        self._start = start
        settings = start.settings
        self._device = open_device(settings, start.rank)
        self._collective = SmartAllReduce(start.rank, settings.tensor_parallel, progress, wiring, self._device)
        self._decoder = load_part(start.config, start.path, start.precision, self._device, self._collective, self._keep_going, start.rank)
        self._prepared: dict[int, tuple[Prepare, PreparedStep]] = {}
        self._hidden: Tensor | None = None
        channel.send(Loaded())

    def connect(self, order: Connect) -> None:
        """Join the others. Raises DeviceError."""
        from npufleet_pod.engine.distributed.collective import join_store

        settings = self._start.settings
        if order.store_port is not None:
            store = join_store(order.store_port, settings.tensor_parallel, settings.rank_timeout_seconds)
            self._collective.connect(store, settings.rank_timeout_seconds)
        self._channel.send(Connected(self._device.free_memory_bytes()))

    def take_cache(self, order: TakeCache) -> None:
        """Take the memory for KV. Raises DeviceError."""
        from npufleet_pod.engine.rank import Rank
        from npufleet_pod.engine.rank_loading import take_cache

        try:
            cache = take_cache(self._decoder, order.layout, self._device)
        except EngineMemoryError as error:
            raise DeviceError(str(error)) from error
        self._rank = Rank(self._decoder, cache, self._device)
        self._channel.send(CacheTaken(cache.page_bytes))

    def serve(self) -> None:
        """Obey until rank 0 says that it is over."""
        import torch

        with torch.inference_mode():
            while not isinstance(order := self._channel.recv(), Close):
                self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Connect():
                self.connect(order)
            case TakeCache():
                self.take_cache(order)
            case AttachHost(size_bytes, slot_bytes, offset):
                self._rank.cache.attach_host(SharedRegion(self._host, size_bytes).buffer, slot_bytes, offset)
            case Prepare(number, step):
                self._prepared[number] = (order, self._rank.prepare(step))
            case Compute(number, known):
                self._compute(number, known)
            case Score(first, last):
                assert self._hidden is not None  # noqa: S101 - rank 0 scores what it computed
                self._decoder.logits(self._hidden[first:last])

    def _compute(self, number: int, known: tuple[tuple[int, int], ...]) -> None:
        given, prepared = self._prepared.pop(number)
        for earlier in [other for other in self._prepared if other < number]:
            del self._prepared[earlier]
        self._rank.transfer(given.step.transfers)
        if not given.step.counts:
            self._progress.advance()
            self._channel.send(Done(number))
            self._progress.advance()
            return
        self._hidden = self._rank.forward(prepared, known)
        if given.step.sample_rows:
            self._decoder.logits(self._hidden[list(given.step.sample_rows)])

    def _keep_going(self) -> bool:
        self._progress.advance()
        return True


def main() -> None:
    """Arguments: pid of rank 0, this rank, number of ranks, descriptors of the channel and of the wiring."""
    parent, rank, ranks, channel_fd, *numbers = (int(argument) for argument in sys.argv[1:])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the signal was asked for.
        return
    channel = Connection(channel_fd)
    try:
        start: Start = channel.recv()
        wiring = Wiring.parse(numbers, ranks)
        _run(channel, Progress(wiring.progress, ranks, rank), wiring, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Rank 0 has gone, and says itself why.
        pass
    # Not through the interpreter's end: threads of torch, Gloo and HCCL may be in the middle of an exchange that nobody answers.
    logging.shutdown()
    os._exit(0)


def _run(channel: Connection, progress: Progress, wiring: Wiring, start: Start) -> None:
    from npufleet_pod.server.logs import configure_logging

    configure_logging(logging.getLevelName(start.log_level), rank=start.rank)
    try:
        worker = Worker(channel, progress, wiring, start)
        worker.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except StartError as error:
        channel.send(Failed(one_line(str(error)), error.exit_code))
    except Exception as error:
        logger.exception("rank ends")
        if isinstance(error, ExchangeError):
            # Another rank's end is usually behind it, of which rank 0 should hear first.
            time.sleep(EXIT_SECONDS)
        channel.send(Failed(one_line(f"{type(error).__name__}: {error}"), None))


if __name__ == "__main__":
    main()
