"""The access log: a line of JSON for each request, without content, keys or addresses.

Lines are gathered and written together by another thread, so that neither a wake-up for each of them nor whoever reads them slowly slows
requests; what comes while too many wait is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TextIO

MAX_WAITING_LINES = 20_000
FLUSH_SECONDS = 0.2


class AccessLog:
    """Lines on `stream`, standard output by default. `write` never blocks."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._waiting: list[str] = []
        self._writing: asyncio.Task[None] | None = None
        self.dropped = 0

    def write(self, **fields: object) -> None:
        """One request. Fields that are None are left out."""
        if len(self._waiting) >= MAX_WAITING_LINES:
            self.dropped += 1
            return
        line = {"time": round(time.time(), 3), **{name: value for name, value in fields.items() if value is not None}}
        self._waiting.append(json.dumps(line, separators=(",", ":")))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, after what a flush that was cancelled has begun to write: cancellation loses no line."""
        await self._written()
        if self._waiting:
            lines, self._waiting = self._waiting, []
            self._writing = asyncio.create_task(asyncio.to_thread(self._write, lines), name="write-access-log")
            await self._written()

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _write(self, lines: list[str]) -> None:
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self.dropped += len(lines)
