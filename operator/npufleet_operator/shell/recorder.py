"""Recorded plans on disk, for `npufleet replay`: what the planner saw and what it answered, in two files of bounded size."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from pathlib import Path

from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import Observed
from npufleet_operator.core.recording import digest, record
from npufleet_operator.shell.metrics import RECORDED_PLANS

logger = logging.getLogger(__name__)

OLDER = ".1"


class PlanRecorder:
    """Shared by all pools. Plans that repeat the last one of their pool are left out: a pool at rest writes nothing.

    What cannot be written is logged and counted, and keeps no pool from being planned.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._half = limit_bytes // 2
        self._last: dict[str, str] = {}
        self._turn = asyncio.Lock()

    async def write(self, observed: Observed, now: datetime, plan: Plan) -> None:
        """Record one plan, off the event loop."""
        async with self._turn:
            result = await asyncio.to_thread(self._write, observed, now, plan)
        RECORDED_PLANS.labels(observed.pool_name, result).inc()

    def _write(self, observed: Observed, now: datetime, plan: Plan) -> str:
        known = digest(plan)
        if self._last.get(observed.pool_name) == known:
            return "repeated"
        line = record(observed, now, plan).encode() + b"\n"
        if len(line) > self._half:
            logger.warning("plan is too large to record", extra={"pool": observed.pool_name, "bytes": len(line), "most": self._half})
            return "too_large"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > self._half:
                self._path.replace(self._path.with_name(self._path.name + OLDER))
            with self._path.open("ab") as file:
                file.write(line)
        except OSError as error:
            logger.warning("plan was not recorded", extra={"pool": observed.pool_name, "error": str(error)})
            return "failed"
        self._last[observed.pool_name] = known
        return "written"
