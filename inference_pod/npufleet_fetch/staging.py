"""A model that is being written: its files, and which ranges of each are there, so that a killed fetch goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npufleet_fetch.files import RemoteFile

FILES = "files"
STATE = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `end` (exclusive) of a file."""

    start: int
    end: int


def cut(size: int, part_bytes: int) -> tuple[Part, ...]:
    """The parts of a file of `size` bytes."""
    return tuple(Part(start, min(start + part_bytes, size)) for start in range(0, size, part_bytes))


class StagedFile:
    """One file while it is written. What a journal says is there was written before it said so; checksums settle what a crash left."""

    def __init__(self, staging: Path, file: RemoteFile, part_bytes: int) -> None:
        self.file = file
        self.path = staging / FILES / file.path
        self._journal = staging / STATE / f"{hashlib.sha256(file.path.encode()).hexdigest()[:32]}.json"
        self.parts = cut(file.size, part_bytes)
        self.done: set[int] = set()
        self.sha256 = ""
        """Once the whole file has been read back and is what the source says."""
        self.generation = 0
        """Counts how often the file was begun anew: what belongs to an earlier one counts for nothing."""
        self.checked = False
        """Someone reads the file back, or has."""
        self._fd = -1
        self._journal_lock = threading.Lock()

    def open(self) -> None:
        """Go on where an earlier fetch of the same version stopped, or begin. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        known = self._read()
        if self.path.exists() and self.path.stat().st_nlink > 1:
            # Linked from a published model, which must not be written to.
            self.path.unlink()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if known.get("identity") == self._identity() and os.fstat(self._fd).st_size == self.file.size:
            self.done = {index for index in known.get("done", []) if isinstance(index, int) and 0 <= index < len(self.parts)}
            self.sha256 = str(known.get("sha256", ""))
        else:
            self.reset()

    def reset(self, parts: tuple[Part, ...] | None = None) -> None:
        """Begin from nothing. Raises OSError."""
        self.parts = self.parts if parts is None else parts
        self.done, self.sha256 = set(), ""
        self.generation += 1
        self._journal.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self.file.size)

    def missing(self) -> tuple[int, ...]:
        """Indices of parts that are not there."""
        return tuple(index for index in range(len(self.parts)) if index not in self.done)

    def bytes_there(self) -> int:
        """Bytes of the parts that are there."""
        return sum(self.parts[index].end - self.parts[index].start for index in self.done)

    def write(self, data: bytes | bytearray, offset: int) -> None:
        """All of `data` at `offset`. Raises OSError."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def finish_part(self, index: int) -> None:
        """A part is there; on disk before the journal says so where no checksum would find a hole. Raises OSError."""
        if not (self.file.sha256 or self.file.git_sha1):
            os.fdatasync(self._fd)
        self.done.add(index)
        self._write_journal()

    def finish(self, sha256: str) -> None:
        """The whole file is there and is what it should be; on disk when this returns. Raises OSError."""
        os.fsync(self._fd)
        self.sha256 = sha256
        self._write_journal()

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _identity(self) -> list[Any]:
        f = self.file
        return [f.path, f.size, f.sha256, f.git_sha1, f.version, [[part.start, part.end] for part in self.parts[:2]]]

    def _read(self) -> dict[str, Any]:
        try:
            known = json.loads(self._journal.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write_journal(self) -> None:
        with self._journal_lock:
            content = {"identity": self._identity(), "done": sorted(self.done), "sha256": self.sha256}
            fresh = self._journal.with_suffix(".new")
            fresh.write_text(json.dumps(content))
            fresh.replace(self._journal)
