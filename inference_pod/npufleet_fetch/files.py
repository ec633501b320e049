"""Files of a source, and what is known of each before it is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from npufleet_fetch.errors import SourceRefusedError

MAX_FILES = 10_000
MAX_NAME = 255
MAX_PATH = 1024


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. Checksums are lower-case hex; empty where the source has none."""

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""
    """Of a git blob, which hubs give for small files."""
    version: str = ""
    """Entity tag, so that ranges of two versions are never mixed."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a source has under one revision. `revision` names exactly this content for ever."""

    revision: str
    files: tuple[RemoteFile, ...]


def checked_path(path: str) -> str:
    """`path`, which comes from outside, if it stays below the folder that it is written to. Raises SourceRefusedError."""
    parts = PurePosixPath(path).parts
    harmless = (
        0 < len(path) <= MAX_PATH
        and not path.startswith("/")
        and "\\" not in path
        and path.isprintable()
        and all(part not in ("..", ".") and len(part.encode()) <= MAX_NAME for part in parts)
        and "/".join(parts) == path
    )
    if not harmless:
        raise SourceRefusedError(f"the source names a file {path[:80]!r}, which is no path below the model: remove it there")
    return path


def content_name(files: tuple[RemoteFile, ...]) -> str:
    """A revision for sources that have none: it changes with every file's path, size or version."""
    lines = sorted(f"{f.path}\0{f.size}\0{f.sha256 or f.version}\n" for f in files)
    return "content-" + hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
