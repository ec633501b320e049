"""Checksums of files, in the forms that sources give."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of one file, lower-case hex; `git_sha1` only where it was asked for."""

    sha256: str
    git_sha1: str = ""


def sums_of(path: Path, *, git: bool = False) -> Sums:
    """Read `path` once. Raises OSError."""
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(usedforsecurity=False)
    with path.open("rb") as file:
        blob.update(b"blob %d\0" % path.stat().st_size)
        while piece := file.read(CHUNK_BYTES):
            sha256.update(piece)
            if git:
                blob.update(piece)
    return Sums(sha256.hexdigest(), blob.hexdigest() if git else "")


def content_digest(files: Iterable[tuple[str, int, str]]) -> str:
    """Digest of a model's content: SHA-256 over its files' path, size and SHA-256, by path."""
    lines = "".join(f"{path}\0{size}\0{sha256}\n" for path, size, sha256 in sorted(files))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()
