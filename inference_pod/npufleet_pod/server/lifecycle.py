"""The replica's life as clients and operator see it: loading, ready, draining, idle. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from npufleet_api.contract import AdminState, EngineState
from npufleet_pod.engine.stats import EngineSnapshot
from npufleet_pod.errors import NotReadyError

logger = logging.getLogger(__name__)


class Lifecycle:
    """Admits requests, counts them until their last byte is sent, and ends them when a drain's time is over.

    Half of that time is for what waits: what has not begun by then could be cut off in the middle, and is handed back to be sent elsewhere.
    """

    def __init__(self, snapshot: Callable[[], EngineSnapshot], hand_back: Callable[[], None], end_all: Callable[[], None]) -> None:
        """snapshot: the engine's load. hand_back: ends every request that has not begun; called in the middle of a drain.
        end_all: gives every request up; called at a drain's deadline."""
        self._snapshot = snapshot
        self._hand_back = hand_back
        self._end_all = end_all
        self._loaded = False
        self._terminating = False
        self._in_flight = 0
        self._deadline: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """Where the replica stands. A replica that drains while it loads is idle: nothing runs."""
        if self._deadline is not None:
            return EngineState.DRAINING if self._busy else EngineState.IDLE
        return EngineState.READY if self._loaded else EngineState.LOADING

    @property
    def unready_reason(self) -> str | None:
        """Why `/ready` says no; None: it says yes."""
        if self._deadline is not None:
            return "draining"
        if not self._loaded:
            return "loading"
        return "terminating" if self._terminating else None

    def admin_state(self) -> AdminState:
        """What the admin port tells. `running` counts every admitted request whose last byte is not sent."""
        load = self._snapshot()
        left = None if self._deadline is None else max(0.0, self._deadline - self._now())
        running = max(load.running, self._in_flight - load.waiting)
        return AdminState(state=self.state, running=running, waiting=load.waiting, drain_deadline_seconds=left)

    def loaded(self) -> None:
        """The model is warm."""
        self._loaded = True
        self._notify()

    def check_admits(self) -> None:
        """Raise NotReadyError if new work is refused."""
        if self._deadline is not None:
            raise NotReadyError("this replica is draining: send the request to another one", draining=True)
        if not self._loaded:
            raise NotReadyError("the model is loading: try again later", draining=False)

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request until the context is left. Raises NotReadyError."""
        self.check_admits()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._notify()

    def terminate(self) -> None:
        """The process was told to end: unready from now on, though work is still taken; a drain can no longer be cancelled."""
        self._terminating = True
        self._notify()

    def drain(self, deadline_seconds: float, reason: str = "") -> None:
        """Refuse new work, hand back what has not begun after half of `deadline_seconds`, and end what still runs after all of them.
        Of several deadlines the earliest holds."""
        now = self._now()
        deadline = now + deadline_seconds
        if self._deadline is None or deadline < self._deadline:
            self._stop_timers()
            self._deadline = deadline
            loop = asyncio.get_running_loop()
            self._timers = [loop.call_at(now + deadline_seconds / 2, self._hand_back), loop.call_at(deadline, self._give_up)]
            logger.info("drain", extra={"deadline_seconds": deadline_seconds, "reason": reason})
        self._notify()

    def cancel_drain(self) -> bool:
        """Take work again; False if the process is about to end."""
        if self._terminating:
            return False
        self._stop_timers()
        self._deadline = None
        self._notify()
        return True

    async def wait_until(self, *states: EngineState) -> None:
        """Wait until the replica is in one of `states`."""
        while self.state not in states:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Stop the drain's timers."""
        self._stop_timers()

    @property
    def _busy(self) -> bool:
        return self._in_flight > 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _notify(self) -> None:
        self._changed.set()

    def _give_up(self) -> None:
        # The drain may have been too short for the other timer to ring first.
        self._hand_back()
        self._end_all()

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []
