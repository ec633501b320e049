"""The access log: a line of JSON for each request, without content, keys or addresses.

A thread of its own writes it, so that whoever reads it slowly does not slow requests; what does not fit its queue is dropped, and counted.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import TextIO

MAX_QUEUED_LINES = 10_000


class AccessLog:
    """Lines on `stream`, standard output by default. `write` never blocks."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, **fields: object) -> None:
        """One request. Fields that are None are left out."""
        if self._lines.qsize() >= MAX_QUEUED_LINES:
            self.dropped += 1
            return
        line = {"time": round(time.time(), 3), **{name: value for name, value in fields.items() if value is not None}}
        self._lines.put(json.dumps(line, separators=(",", ":")))

    def stop(self) -> None:
        """Write what is queued, and end."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(timeout=5)
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                self.dropped += 1
