"""One rank's process, as rank 0 sees it: started, spoken to, ended. Imports no torch."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from npufleet_pod.engine.distributed.messages import Order
from npufleet_pod.engine.distributed.wiring import Wiring

logger = logging.getLogger(__name__)

EXIT_SECONDS = 5
"""Time that a process gets between closing its channel and being gone."""
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a device or disk", "Z": "ended"}
"""Of /proc/PID/stat, those in which a process does nothing (proc(5))."""


class RankProcess:
    """A process of its own for one rank. It dies with the thread that started it."""

    def __init__(self, rank: int, ranks: int, wiring: Wiring) -> None:
        """wiring: what the process shares with the others, and inherits."""
        self.rank = rank
        self._lock = threading.Lock()
        own, theirs = Pipe()
        self.channel: Connection = own
        numbers = [theirs.fileno(), *wiring.numbers()]
        # A new interpreter, never a fork: NPU and threads of torch do not survive one. A session of its own, so that Ctrl-C in a
        # terminal reaches rank 0 only, which drains.
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and numbers
            [sys.executable, "-m", "npufleet_pod.engine.distributed.worker", str(os.getpid()), str(rank), str(ranks), *map(str, numbers)],
            pass_fds=[number for number in numbers if number >= 0],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} (pid {self._process.pid})"

    def send(self, order: Order) -> None:
        """Tell the rank something. Raises OSError if it is gone. Safe to use from several threads."""
        with self._lock:
            self.channel.send(order)

    def state(self) -> str:
        """What the kernel says of a process that does nothing; empty for one that could run."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return STATES["Z"]
        return STATES.get(stat.rpartition(")")[2].split()[0], "")

    def describe_end(self) -> str:
        """How the process ended, once its channel is closed."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its channel and did not end"
        if code >= 0:
            return f"exited with code {code}: see the container's log"
        name = signal.Signals(-code).name
        remedy = ": if nobody did it, memory ran out: raise the memory limit" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{remedy}"

    def kill(self) -> None:
        """End the process at once, stopped or not."""
        self._process.kill()

    def end(self) -> None:
        """Wait a moment for the process to end by itself, then end it. One that the kernel does not let go is left to it, and told."""
        for _ in range(2):
            try:
                self._process.wait(EXIT_SECONDS)
                return
            except subprocess.TimeoutExpired:
                self._process.kill()
        logger.error("a rank cannot be ended", extra={"rank": self.rank, "pid": self._process.pid, "state": self.state()})
