"""The ranks of a model, as rank 0 leads them: every other one is a process that it starts, orders about, watches and ends.

Nothing here imports torch. A rank that dies is known by its closed channel, one that hangs by its counter, which stands still while the
others wait; whichever it is, the rest are killed, so that whoever waits for them comes back, and the engine is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

from npufleet_pod.engine.distributed.messages import Close, Compute, Done, Failed, Order, Prepare, Report, Score, Start
from npufleet_pod.engine.distributed.process import EXIT_SECONDS, RankProcess
from npufleet_pod.engine.distributed.progress import Progress
from npufleet_pod.engine.distributed.wiring import Wiring
from npufleet_pod.engine.step_input import StepInput
from npufleet_pod.errors import ExchangeError, LoadCancelledError, RankError, RankStartError

logger = logging.getLogger(__name__)

LOADING_PATIENCE = 10
"""While the model loads, a rank may stand still so many times longer than while it serves: a layer comes from a disk, or over a network."""
EXPLAIN_SECONDS = EXIT_SECONDS + 1
"""Time in which the end of a rank is noticed and understood, after something went wrong between the ranks."""
POLL_SECONDS = 0.2

Answer = TypeVar("Answer", bound=Report)


class RankGroup:
    """Ranks 1 to `ranks` - 1. A `runner.Peers`. Started, and used while loading, by the thread that computes."""

    def __init__(
        self, ranks: int, timeout_seconds: float, start: Callable[[int], Start], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the processes. start: a rank's first message. timeout_seconds: how long all ranks may stand still in a step."""
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._clock = clock
        self.wiring = Wiring.create(ranks)
        self.progress = Progress(self.wiring.progress, ranks, 0)
        self._changed = threading.Condition()
        self._reports: dict[int, list[Report]] = {rank: [] for rank in range(1, ranks)}
        self._failure: Exception | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self._closing = False
        self._busy_since: float | None = clock()
        self._patience = LOADING_PATIENCE * timeout_seconds
        self._processes: list[RankProcess] = []
        self._at_close: list[Callable[[], None]] = []
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, ranks):
                self._processes.append(RankProcess(rank, ranks, self.wiring))
            self.broadcast(lambda rank: start(rank))
        except BaseException:
            self._end_processes(kill=True)
            self.wiring.close()
            raise
        self._watcher.start()

    def broadcast(self, order: Callable[[int], Order]) -> None:
        """Send each rank its order. Raises RankError, or RankStartError while loading, if one is gone."""
        try:
            for process in self._processes:
                process.send(order(process.rank))
        except OSError as error:
            raise self._explain(error) from error

    def collect(self, kind: type[Answer], keep_going: Callable[[], bool]) -> Mapping[int, Answer]:
        """The next report of every rank, by rank. Raises what ended a rank; LoadCancelledError once `keep_going` answers False."""
        answers: dict[int, Answer] = {}
        with self._changed:
            while len(answers) < self.ranks - 1:
                self._check()
                if not keep_going():
                    raise LoadCancelledError("loading was given up since the process ends")
                for rank, reports in self._reports.items():
                    if rank not in answers and reports:
                        report = reports.pop(0)
                        if not isinstance(report, kind):
                            raise RankError(f"rank {rank} answered {report!r} where {kind.__name__} was due")
                        answers[rank] = report
                if len(answers) < self.ranks - 1:
                    self._changed.wait(POLL_SECONDS)
        return answers

    def watched(self, keep_going: Callable[[], bool]) -> Callable[[], bool]:
        """`keep_going`, asked once per layer that rank 0 loads, which also raises what ended another rank."""

        def going() -> bool:
            self.progress.advance()
            with self._changed:
                self._check()
            return keep_going()

        return going

    def at_close(self, action: Callable[[], None]) -> None:
        """Have something done once all ranks have ended."""
        self._at_close.append(action)

    def serving(self) -> None:
        """Loading is over: from now on ranks are watched while a step is computed."""
        with self._changed:
            self._busy_since = None
            self._patience = self.timeout_seconds

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Have `on_failure` called, on a thread of the group's own, when a rank dies or hangs, or at once if one has."""
        with self._changed:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def prepare(self, number: int, step: StepInput) -> None:
        """See Peers."""
        order = Prepare(number, step)
        self.broadcast(lambda _: order)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """See Peers."""
        with self._changed:
            self._check()
            idle, self._busy_since = self._busy_since, self._clock()
        try:
            with self.explained():
                yield
        finally:
            with self._changed:
                self._busy_since = idle

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong inside ends all ranks, and is raised as what lies behind it."""
        try:
            yield
        except Exception as error:
            explained = self._explain(error)
            if explained is error:
                raise
            raise explained from error

    def compute(self, number: int, known: Sequence[tuple[int, int]]) -> None:
        """See Peers."""
        order = Compute(number, tuple(known))
        self.broadcast(lambda _: order)

    def wait_done(self) -> None:
        """Wait until every rank has done the step that it was given last, which had no tokens."""
        self.progress.advance()
        self.collect(Done, lambda: True)
        self.progress.advance()

    def score(self, first: int, last: int) -> None:
        """See Peers."""
        order = Score(first, last)
        self.broadcast(lambda _: order)

    def close(self) -> None:
        """End every rank. Harmless when repeated."""
        with self._changed:
            closed, self._closing = self._closing, True
        if closed:
            return
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.send(Close())
        self._end_processes(kill=self._failure is not None)
        self._watcher.join(EXIT_SECONDS)
        if self._watcher.is_alive():
            # Of a process that the kernel does not let go, as in a device's driver, the channel stays open.
            return
        for process in self._processes:
            process.channel.close()
        self.wiring.close()
        for action in self._at_close:
            action()

    def _end_processes(self, *, kill: bool) -> None:
        for process in self._processes:
            if kill:
                process.kill()
        for process in self._processes:
            process.end()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _explain(self, error: Exception) -> Exception:
        """What lies behind an error that came up between the ranks."""
        if isinstance(error, RankError | RankStartError):
            return error
        if isinstance(error, ExchangeError | OSError):
            with self._changed:
                if self._changed.wait_for(lambda: self._failure is not None, EXPLAIN_SECONDS) and self._failure is not None:
                    return self._failure
        failure = RankError(f"rank 0 (pid {os.getpid()}) failed in a step of all ranks: {type(error).__name__}: {error}")
        self._fail(failure)
        return failure

    def _fail(self, failure: Exception) -> None:
        """Make known what ended the group, once, and end what is left of it."""
        with self._changed:
            if self._failure is not None or self._closing:
                return
            self._failure = failure
            on_failure = self._on_failure
            self._changed.notify_all()
        self.progress.give_up()
        logger.error("ranks end", extra={"reason": str(failure)})
        for process in self._processes:
            process.kill()
        if on_failure is not None:
            on_failure(failure)

    def _watch(self) -> None:
        """The watcher's thread: takes reports, and looks at the counters."""
        open_channels = {process.channel: process for process in self._processes}
        seen, moved_at = self.progress.counts(), self._clock()
        while open_channels:
            for channel in wait(list(open_channels), timeout=min(1.0, self.timeout_seconds / 4)):
                process = open_channels[channel]  # type: ignore[index] # wait gives back what it was given
                try:
                    self._take(process, process.channel.recv())
                except (EOFError, OSError):
                    del open_channels[process.channel]
                    if not self._closing:
                        self._fail(RankError(f"{process.name} {process.describe_end()}"))
            counts = self.progress.counts()
            if counts != seen:
                seen, moved_at = counts, self._clock()
            with self._changed:
                since, patience = self._busy_since, self._patience
            if since is not None and self._clock() - max(since, moved_at) >= patience:
                limit = f"rankTimeoutSeconds is {self.timeout_seconds:g}"
                self._fail(RankError(f"{self._culprit(counts)}: no rank moved for {patience:g} s, {limit}"))

    def _take(self, process: RankProcess, report: Report) -> None:
        if isinstance(report, Failed):
            if report.exit_code is None:
                self._fail(RankError(f"{process.name} failed: {report.message}"))
            else:
                self._fail(RankStartError(f"rank {process.rank}: {report.message}", report.exit_code))
            return
        with self._changed:
            self._reports[process.rank].append(report)
            self._changed.notify_all()

    def _culprit(self, counts: Sequence[int]) -> str:
        """Who holds the others up: one that the kernel has stopped, else the one that is behind, else nobody in particular."""
        idle = {process.rank: state for process in self._processes if (state := process.state())}
        names = {0: f"rank 0 (pid {os.getpid()})", **{process.rank: process.name for process in self._processes}}
        if idle:
            return ", ".join(f"{names[rank]} is {state}" for rank, state in idle.items())
        if len(set(counts)) == 1:
            return "all ranks wait for each other in the same exchange"
        behind = counts.index(min(counts))
        return f"{names[behind]} hangs, {max(counts) - min(counts)} exchanges behind the others"
