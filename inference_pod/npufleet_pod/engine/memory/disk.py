"""Pages of KV as files: each with a checksum over its name and content, published whole or not at all. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from pathlib import Path
from typing import Protocol

from npufleet_pod.engine.memory.errors import TierError

MAGIC = b"NPUFKV01"
CHECKSUM_BYTES = 16
HEADER = struct.Struct(f"<8sQ{CHECKSUM_BYTES}s")
"""Magic, payload bytes, BLAKE2b of the payload keyed by the page's digest, so that a file under another's name fails too."""
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"


class PageStore(Protocol):
    """Where pages live below the host's memory. Called by one worker at a time."""

    def write(self, digest: bytes, data: memoryview) -> None:
        """Keep a page. Raises TierError; then nothing is kept."""
        ...

    def read(self, digest: bytes, into: memoryview) -> None:
        """Fill `into` with a page. Raises TierError, with `into` undefined."""
        ...

    def delete(self, digest: bytes) -> None:
        """Forget a page; no error if there is none."""
        ...


class DiskStore:
    """One file per page in a directory that this process owns: what another run left there is removed first. Raises TierError.

    A torn or foreign file fails its checksum and is removed. A file is not synced: after a crash of the host nothing is read back anyway.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in directory.iterdir():
                if path.suffix in (SUFFIX, TEMPORARY_SUFFIX):
                    path.unlink()
        except OSError as error:
            raise TierError(f"KV directory {directory}: {error.strerror}: mount a writable volume there") from error

    def write(self, digest: bytes, data: memoryview) -> None:
        """See PageStore."""
        path = self._path(digest)
        temporary = path.with_suffix(TEMPORARY_SUFFIX)
        try:
            # A file is 0600: KV tells what was said.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a Path opens no descriptor
                _write_all(file.fileno(), _header(digest, data))
                _write_all(file.fileno(), data)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise TierError(f"KV file {path}: {error.strerror}: free space there, or lower the disk tier's size") from error

    def read(self, digest: bytes, into: memoryview) -> None:
        """See PageStore."""
        path = self._path(digest)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER.size)
                size = _read_up_to(file.fileno(), into)
                longer = bool(file.read(1))
        except OSError as error:
            raise TierError(f"KV file {path}: {error.strerror}: the page is computed again") from error
        if size != len(into) or longer or header != _header(digest, into):
            self.delete(digest)
            raise TierError(f"KV file {path}: its checksum does not match: it was removed, the page is computed again")

    def delete(self, digest: bytes) -> None:
        """See PageStore. A file that cannot be removed stays; the next run's start removes it, and its checksum guards it until then."""
        with contextlib.suppress(OSError):
            self._path(digest).unlink()

    def _path(self, digest: bytes) -> Path:
        return self._directory / (digest.hex() + SUFFIX)


def _header(digest: bytes, data: memoryview) -> bytes:
    return HEADER.pack(MAGIC, len(data), hashlib.blake2b(data, digest_size=CHECKSUM_BYTES, key=digest).digest())


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_up_to(descriptor: int, into: memoryview) -> int:
    """Bytes read: less than `into` holds only at the file's end."""
    done = 0
    while done < len(into):
        count = os.readv(descriptor, [into[done:]])
        if count == 0:
            break
        done += count
    return done
