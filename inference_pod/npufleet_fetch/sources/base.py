"""What every source can do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from npufleet_fetch.files import Listing, RemoteFile


class Source(Protocol):
    """An opened source; `close` ends its connections."""

    async def list(self) -> Listing:
        """Every file of the revision that was asked for. Raises FetchError, or TransientError where another attempt may help."""
        ...

    def read(self, file: RemoteFile, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes `start` to `end` (exclusive) of a file, in pieces. Raises FetchError, TransientError, or NoRangesError."""
        ...

    async def close(self) -> None:
        """End all connections."""
        ...
