"""Host memory that processes of a pod share. Imports no torch.

A memfd, and no file in /dev/shm: that file system holds 64 MiB in a pod unless its template asks for more.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType

from npufleet_pod.engine.memory.errors import LayoutError, OutOfMemoryError


def create_shared(name: str) -> int:
    """A descriptor of shared memory of no size yet, closed on exec; `name` is what /proc shows."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


class SharedRegion:
    """A mapping of shared memory, seen by every process that maps the same descriptor. Raises OutOfMemoryError."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map `descriptor`, grown to `size_bytes` if it is smaller. It may be closed afterwards."""
        if size_bytes < 1:
            raise LayoutError(f"size: {size_bytes} bytes cannot be mapped: ask for at least 1")
        self.size_bytes = size_bytes
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                os.ftruncate(descriptor, size_bytes)
            self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise OutOfMemoryError(
                f"{size_bytes} bytes of shared memory: {error.strerror}: lower the size or raise the memory limit"
            ) from error
        self.buffer = memoryview(self._map)

    def give_back(self, start: int, size: int) -> None:
        """Let the host have the whole memory pages inside [start, start + size), whose content is lost; they come back when written."""
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            # DONTNEED would only unmap them: what is shared stays in memory until a hole is punched.
            self._map.madvise(mmap.MADV_REMOVE, first, end - first)

    def close(self) -> None:
        """Unmap. Raises BufferError while a view still uses the region."""
        self.buffer.release()
        self._map.close()

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
