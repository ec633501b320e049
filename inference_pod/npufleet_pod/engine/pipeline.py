"""Overlaps the three parts of a step: prepare (decide, build the batch), compute, output (detokenise, stream). Imports no torch.

Each part has a thread of its own, so that one step is prepared and another answered while a third computes; a part of the work of
each step that needs the device is ordered on it by `device.Device`'s streams and events. Choosing the token ends the compute part,
since the next step begins with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer")
Work = TypeVar("Work")
Result = TypeVar("Result")

BUFFERS = 2
"""Buffers between two stages: one is filled while the other is read."""
MAX_DEPTH = 2 * BUFFERS
STALL_WINDOW_SECONDS = 10.0


class DoubleBuffer(Generic[Buffer]):
    """Buffers that go round between two threads: the producer fills one while the consumer reads the other. In order; never copied."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._changed = threading.Condition()
        self._free: deque[Buffer] = deque(buffers)
        self._full: deque[Buffer] = deque()
        self._closed = False

    def acquire(self) -> Buffer | None:
        """Producer: wait for a buffer to fill; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            return None if self._closed else self._free.popleft()

    def publish(self, buffer: Buffer) -> None:
        """Producer: give a filled buffer to the consumer. After a close it is dropped."""
        with self._changed:
            if not self._closed:
                self._full.append(buffer)
            self._changed.notify_all()

    def read(self) -> Buffer | None:
        """Consumer: wait for the oldest filled buffer; None once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._full or self._closed)
            return self._full.popleft() if self._full else None

    def release(self, buffer: Buffer) -> None:
        """Consumer: the buffer may be filled again."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Let both sides end; what is filled can still be read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(slots=True)
class _Slot(Generic[Work, Result]):
    """What a buffer holds."""

    work: Work | None = None
    result: Result | None = None


class PipelineController:
    """How many steps are in flight, and how long compute works and waits for work that was there. Safe to use from several threads."""

    def __init__(self, depth: int, clock: Callable[[], float] = time.monotonic) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"pipeline depth is {depth}: choose 1 to {MAX_DEPTH}")
        self.depth = depth
        self._clock = clock
        self._busy_since = clock()
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, float, float]] = deque()
        """(second, waited, computed) of the window."""
        self.waited_seconds = 0.0
        self.computed_seconds = 0.0

    def now(self) -> float:
        """The controller's clock, in seconds."""
        return self._clock()

    def mark_busy(self) -> None:
        """There is work again after none: waiting before this moment was no stall."""
        with self._lock:
            self._busy_since = self._clock()

    def account_wait(self, began: float) -> None:
        """Compute waited from `began` until now."""
        with self._lock:
            now = self._clock()
            self._account(now, max(0.0, now - max(began, self._busy_since)), 0.0)

    def account_compute(self, began: float) -> None:
        """Compute worked from `began` until now."""
        with self._lock:
            now = self._clock()
            self._account(now, 0.0, now - began)

    def _account(self, now: float, waited_seconds: float, computed_seconds: float) -> None:
        self.waited_seconds += waited_seconds
        self.computed_seconds += computed_seconds
        second = float(int(now))
        if self._recent and self._recent[-1][0] == second:
            _, waited, computed = self._recent.pop()
            self._recent.append((second, waited + waited_seconds, computed + computed_seconds))
        else:
            self._recent.append((second, waited_seconds, computed_seconds))
        self._forget(now)

    @property
    def stall_ratio(self) -> float:
        """Share of the last seconds' busy time that compute waited, 0 to 1; 0 while nothing was to do."""
        with self._lock:
            self._forget(self._clock())
            waited = sum(entry[1] for entry in self._recent)
            computed = sum(entry[2] for entry in self._recent)
            return waited / (waited + computed) if waited + computed > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - STALL_WINDOW_SECONDS:
            self._recent.popleft()


class ThreeStagePipeline(Generic[Work, Result]):
    """Runs prepare, compute and output on three threads; with depth 1 on the caller's alone, one step after the other."""

    def __init__(
        self,
        prepare: Callable[[], Work | None],
        compute: Callable[[Work], Result],
        output: Callable[[Work, Result], None],
        controller: PipelineController,
        stop: Callable[[], None],
    ) -> None:
        """prepare: waits for the next step's work, of which it gives out at most the controller's depth before output had the first;
        None: there is no more. stop: makes a waiting prepare return None; called when another stage failed.
        """
        self._prepare = prepare
        self._compute = compute
        self._output = output
        self._controller = controller
        self._stop = stop
        self._to_compute = DoubleBuffer[_Slot[Work, Result]]([_Slot() for _ in range(BUFFERS)])
        self._to_output = DoubleBuffer[_Slot[Work, Result]]([_Slot() for _ in range(BUFFERS)])
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Compute on the caller's thread until prepare says that there is no more. Raises what the first stage to fail raised."""
        if self._controller.depth == 1:
            self._run_alone()
            return
        threads = [
            threading.Thread(target=self._guard, args=(stage,), name=f"engine-{name}", daemon=True)
            for name, stage in (("prepare", self._prepare_stage), ("output", self._output_stage))
        ]
        for thread in threads:
            thread.start()
        self._guard(self._compute_stage)
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run_alone(self) -> None:
        while True:
            began = self._controller.now()
            work = self._prepare()
            if work is None:
                return
            self._controller.account_wait(began)
            self._output(work, self._timed_compute(work))

    def _guard(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:  # noqa: BLE001 - raised again by run
            self._errors.append(error)
            self._to_compute.close()
            self._to_output.close()
            self._stop()

    def _prepare_stage(self) -> None:
        while (work := self._prepare()) is not None:
            slot = self._to_compute.acquire()
            if slot is None:
                return
            slot.work = work
            self._to_compute.publish(slot)
        self._to_compute.close()

    def _compute_stage(self) -> None:
        while True:
            began = self._controller.now()
            slot = self._to_compute.read()
            if slot is None or slot.work is None:
                break
            work, slot.work = slot.work, None
            self._controller.account_wait(began)
            result = self._timed_compute(work)
            self._to_compute.release(slot)
            done = self._to_output.acquire()
            if done is None:
                return
            done.work, done.result = work, result
            self._to_output.publish(done)
        self._to_output.close()

    def _output_stage(self) -> None:
        while (slot := self._to_output.read()) is not None:
            work, result, slot.work, slot.result = slot.work, slot.result, None, None
            if work is not None and result is not None:
                self._output(work, result)
            self._to_output.release(slot)

    def _timed_compute(self, work: Work) -> Result:
        began = self._controller.now()
        result = self._compute(work)
        self._controller.account_compute(began)
        return result
