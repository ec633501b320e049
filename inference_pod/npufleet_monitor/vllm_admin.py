"""What the admin port of an engine tells, for vLLM, which has none: state from its health and metrics, and a drain from outside.

vLLM cannot be told to refuse work. A drain takes the replica out of rotation, waits until nothing runs and nothing waits, and leaves
its end to whoever deletes the pod.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from npufleet_api.contract import HEALTH_PATH, METRICS_PATH, AdminState, EngineState
from npufleet_monitor.collectors.engine import EngineSample, parse_engine
from npufleet_monitor.collectors.http import fetch
from npufleet_monitor.errors import ScrapeError

logger = logging.getLogger(__name__)

MAX_COUNT = 1_000_000
"""Of AdminState."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How careful a drain is."""

    settle_seconds: float = 5
    """From its beginning until it may be over: clients that go by the pod's readiness still send meanwhile."""
    quiet_seconds: float = 1
    """How long nothing must run and wait: a request that vLLM has just taken is in no metric yet."""
    sick_seconds: float = 10
    """A vLLM that has been unhealthy for so long is not waited for at its end: it is being restarted since it hangs."""
    poll_seconds: float = 0.25


DEFAULT_TIMING = Timing()


class VllmAdmin:
    """Lives on one event loop. Each answer is a fresh look at vLLM."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timing: Timing = DEFAULT_TIMING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._health_url = f"{url}{HEALTH_PATH}"
        self._metrics_url = f"{url}{METRICS_PATH}"
        self._timing = timing
        self._clock = clock
        self._loaded = False
        self._sick_since: float | None = None
        self._terminating = False
        self._ended = False
        """The kubelet was told that it may end vLLM."""
        self._deadline: float | None = None
        self._settled = 0.0
        """When a drain may be over at the earliest."""
        self._quiet_since: float | None = None

    async def ready(self) -> bool:
        """Whether new requests may come."""
        return self._deadline is None and await self._is_healthy()

    async def state(self) -> AdminState:
        """Where vLLM stands. One that cannot tell its load is busy; one that drains before it was loaded is idle."""
        healthy = await self._is_healthy()
        load = await self._load() if healthy else None
        running, waiting = (_count(load.running), _count(load.waiting)) if load else (0, 0)
        if self._deadline is None:
            return AdminState(state=EngineState.READY if healthy else EngineState.LOADING, running=running, waiting=waiting)
        now = self._clock()
        busy = load is None or load.running is None or load.waiting is None or running + waiting > 0
        if busy:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        quiet = self._quiet_since is not None and now - self._quiet_since >= self._timing.quiet_seconds
        idle = not self._loaded or (quiet and now >= self._settled)
        state = EngineState.IDLE if idle else EngineState.DRAINING
        return AdminState(state=state, running=running, waiting=waiting, drain_deadline_seconds=max(0.0, self._deadline - now))

    def drain(self, deadline_seconds: float, reason: str = "") -> None:
        """Be unready. Of several deadlines the earliest holds."""
        self._begin(deadline_seconds, self._timing.settle_seconds, reason)

    def cancel_drain(self) -> bool:
        """Be ready again; False once the pod is about to end."""
        if self._terminating:
            return False
        self._deadline = self._quiet_since = None
        return True

    async def terminate(self, accept_seconds: float, drain_seconds: float) -> None:
        """Be unready until another vLLM runs, and return once nothing runs, at the earliest after `accept_seconds` in which endpoints
        change; at the latest `drain_seconds` later, or at the deadline of a drain that goes on already."""
        self._terminating = True
        self._begin(accept_seconds + drain_seconds, accept_seconds, "terminating")
        while (state := await self.state()).state is not EngineState.IDLE:
            sick = self._sick_since is not None and self._clock() - self._sick_since >= self._timing.sick_seconds
            if sick or not state.drain_deadline_seconds:
                why = "vLLM is not healthy" if sick else "the time is over"
                logger.warning("ends with %d running and %d waiting requests: %s", state.running, state.waiting, why)
                break
            await asyncio.sleep(self._timing.poll_seconds)
        self._ended = True

    def _begin(self, deadline_seconds: float, settle_seconds: float, reason: str) -> None:
        now = self._clock()
        if self._deadline is None:
            self._settled = now + settle_seconds
            logger.info("drain for at most %g s: %s", deadline_seconds, reason or "asked for")
        self._deadline = min(now + deadline_seconds, self._deadline if self._deadline is not None else float("inf"))

    async def _is_healthy(self) -> bool:
        try:
            await fetch(self._session, self._health_url)
        except ScrapeError:
            if self._sick_since is None:
                self._sick_since = self._clock()
            if self._ended:
                self._forget()
            return False
        self._loaded, self._sick_since = True, None
        return True

    def _forget(self) -> None:
        """vLLM was ended. Where the pod goes on, since a probe failed, another one starts, and its life is a new one."""
        self._loaded = self._terminating = self._ended = False
        self._deadline = self._quiet_since = None

    async def _load(self) -> EngineSample | None:
        try:
            return parse_engine(await fetch(self._session, self._metrics_url))
        except ScrapeError as error:
            logger.warning("%s", error)
            return None


def _count(value: float | None) -> int:
    return int(min(MAX_COUNT, value or 0))
