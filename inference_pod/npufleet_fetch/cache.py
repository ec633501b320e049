"""`Cache`: published models on a node's disk or on a shared volume, safe with several pods at once.

A model is written below `partial/` under an exclusive lock and renamed into `models/` when it is complete, so that no half-written one is
ever seen. Engines hold a shared lock on what they serve; a lock ends with its process, so nothing has to be cleaned up after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_api.fetching import IN_USE_FILE, FetchSettings
from npufleet_fetch.checksums import content_digest, sums_of
from npufleet_fetch.disk import at
from npufleet_fetch.eviction import GRACE_SECONDS, Held, choose_victims
from npufleet_fetch.files import MAX_FILES, RemoteFile
from npufleet_fetch.staging import FILES

MANIFEST_FILE = ".npufleet.json"
LAYOUT = "v1"


class CachedFile(BaseModel):
    """A file as it was when it was published."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    size: int
    sha256: str
    modified_ns: int


class Manifest(BaseModel):
    """What a published model consists of."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uri: str
    revision: str
    digest: str
    files: list[CachedFile] = Field(max_length=MAX_FILES)

    @property
    def bytes(self) -> int:
        """All files together."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Published:
    """A complete model."""

    path: Path
    manifest: Manifest


def cache_key(settings: FetchSettings) -> str:
    """Folder of a source's models: what is fetched, from where, and who may use it."""
    parts = [settings.uri, settings.endpoint, settings.region, sorted(settings.files), settings.allow_pickle, settings.scope]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", settings.uri)[-48:].strip("-")
    return f"{readable}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


class Cache:
    """One cache folder. Methods block: run them in a thread. Raises CacheFullError and CacheUnavailableError."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self._base = root / LAYOUT
        self._clock = clock

    def prepare(self) -> None:
        """Make the folders that are not there yet."""
        with at(self.root):
            for name in ("models", "partial", "locks"):
                (self._base / name).mkdir(parents=True, exist_ok=True)
            probe = self._base / "locks" / f".probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()

    def staging(self, key: str, revision: str) -> Path:
        """Folder of a model that is being written."""
        return self._base / "partial" / f"{key}@{_folder(revision)}"

    @contextmanager
    def lock(self, name: str) -> Iterator[bool]:
        """Try to be the only one at `name`; False where someone else is."""
        with at(self.root):
            fd = os.open(self._base / "locks" / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _try_lock(fd)
        finally:
            os.close(fd)

    def find(self, key: str, revision: str) -> Published | None:
        """The published model, if it is there and whole; one that is not is put away."""
        path = self._base / "models" / key / _folder(revision)
        with at(self.root):
            manifest = _manifest(path)
            if manifest is None or manifest.revision != revision:
                return None
            if not all(_intact(path, file) for file in manifest.files):
                self._put_away(path)
                return None
            if not _touch(path / IN_USE_FILE):
                return None
        return Published(path, manifest)

    def reuse(self, key: str, staging: Path, files: tuple[RemoteFile, ...]) -> dict[str, str]:
        """Link files that another revision of the same source already has into `staging`. Returns their SHA-256, by path."""
        known = {
            (file.sha256, file.size): path / file.path
            for path in sorted((self._base / "models" / key).glob("*"))
            if (manifest := _manifest(path)) is not None
            for file in manifest.files
            if _intact(path, file)
        }
        linked = {}
        with at(self.root):
            for wanted in files:
                source = known.get((wanted.sha256, wanted.size)) if wanted.sha256 else None
                target = staging / FILES / wanted.path
                if source is None:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    # Unless it was evicted just now: then it is fetched.
                    os.link(source, target)
                    linked[wanted.path] = wanted.sha256
        return linked

    def make_room(self, staging: Path, need: int, limit: int | None) -> tuple[str, ...]:
        """Evict what no engine uses until `need` more bytes fit. Returns what went."""
        with at(self.root):
            staging.mkdir(parents=True, exist_ok=True)
            with (self._base / "locks" / "evict.lock").open("a") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                room = os.statvfs(self.root)
                held = {path: one for path, one in self._held() if path != staging}
                there = _disk_bytes(staging)
                free = room.f_bavail * room.f_frsize
                victims = choose_victims(tuple(held.values()), max(0, need - there), _less(limit, there), free, self._clock())
                return tuple(one.name for path, one in held.items() if one in victims and self._evict(path))

    def publish(self, key: str, staging: Path, manifest: Manifest) -> Published:
        """Make the staged files a published model, at once and for good."""
        target = self._base / "models" / key / _folder(manifest.revision)
        with at(self.root):
            files = staging / FILES
            (files / IN_USE_FILE).touch()
            content = files / MANIFEST_FILE
            content.write_text(manifest.model_dump_json())
            with content.open("rb") as file:
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                self._put_away(target)
            files.rename(target)
            folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
            shutil.rmtree(staging, ignore_errors=True)
        return Published(target, manifest)

    def manifest_of(self, staging: Path, uri: str, revision: str, sums: dict[str, str]) -> Manifest:
        """The manifest of staged files with these SHA-256."""
        files = []
        with at(self.root):
            for path, sha256 in sorted(sums.items()):
                found = (staging / FILES / path).stat()
                files.append(CachedFile(path=path, size=found.st_size, sha256=sha256, modified_ns=found.st_mtime_ns))
        digest = content_digest((file.path, file.size, file.sha256) for file in files)
        return Manifest(uri=uri, revision=revision, digest=digest, files=files)

    def verify(self) -> Iterator[tuple[Published, str]]:
        """Read every published model back; the first file of each that is not as it was published, or an empty text."""
        for path in sorted((self._base / "models").glob("*/*")):
            manifest = _manifest(path)
            if manifest is not None:
                wrong = next((f.path for f in manifest.files if not _same(path, f)), "")
                yield Published(path, manifest), wrong

    def discard(self, published: Published) -> None:
        """Take a model out of the cache."""
        with at(self.root):
            self._put_away(published.path)

    def _held(self) -> Iterator[tuple[Path, Held]]:
        models, partial = (self._base / "models").glob("*/*"), (self._base / "partial").glob("*")
        for path, look in (*((p, self._held_model) for p in models), *((p, self._held_partial) for p in partial)):
            try:
                found = look(path)
            except FileNotFoundError:
                # Published or removed by another pod meanwhile.
                continue
            if found is not None:
                yield path, found

    def _held_model(self, path: Path) -> Held | None:
        manifest = _manifest(path)
        if manifest is None:
            return None
        used = (path / IN_USE_FILE).stat().st_mtime
        return Held(f"{path.parent.name}/{path.name}", manifest.bytes, used, _is_locked(path / IN_USE_FILE))

    def _held_partial(self, path: Path) -> Held:
        lock = self._base / "locks" / f"{path.name}.lock"
        return Held(f"partial/{path.name}", _disk_bytes(path), path.stat().st_mtime, _is_locked(lock))

    def _evict(self, path: Path) -> bool:
        """Under its own lock, and unless it was used a moment ago."""
        complete = path.parent.parent.name == "models"
        lock = path / IN_USE_FILE if complete else self._base / "locks" / f"{path.name}.lock"
        if not complete and not lock.exists():
            self._put_away(path)
            return True
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not _try_lock(fd) or (complete and self._clock() - os.fstat(fd).st_mtime < GRACE_SECONDS):
                return False
            self._put_away(path)
            return True
        finally:
            os.close(fd)

    def _put_away(self, path: Path) -> None:
        """Renamed first: what is being removed is never found."""
        gone = self._base / "partial" / f"gone-{uuid.uuid4().hex}"
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def link(published: Published, link_path: Path) -> None:
    """Point `link_path` at the model, replacing what it pointed at before."""
    with at(link_path):
        fresh = link_path.with_name(f".{link_path.name}-{uuid.uuid4().hex}")
        fresh.symlink_to(published.path)
        fresh.replace(link_path)


def _folder(revision: str) -> str:
    """A folder's name that stands for a revision; branches may hold slashes."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", revision):
        return revision
    return "rev-" + hashlib.sha256(revision.encode()).hexdigest()[:32]


def _manifest(path: Path) -> Manifest | None:
    try:
        return Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _intact(path: Path, file: CachedFile) -> bool:
    """Size and time are those of publishing; where only the time differs, the content decides."""
    try:
        found = (path / file.path).stat()
    except OSError:
        return False
    if found.st_size != file.size:
        return False
    return found.st_mtime_ns == file.modified_ns or _same(path, file)


def _same(path: Path, file: CachedFile) -> bool:
    try:
        return sums_of(path / file.path).sha256 == file.sha256
    except OSError:
        return False


def _disk_bytes(folder: Path) -> int:
    """Disk that files below `folder` take; of files with holes, what is written; of files that are linked elsewhere, nothing."""
    found = (path.stat() for path in folder.rglob("*") if path.is_file())
    return sum(stat.st_blocks * 512 for stat in found if stat.st_nlink == 1)


def _less(limit: int | None, there: int) -> int | None:
    return None if limit is None else max(0, limit - there)


def _touch(path: Path) -> bool:
    """Say that a model is used now; False where it has just been evicted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not path.exists():
            return False
        os.utime(fd)
        return True
    finally:
        os.close(fd)


def _is_locked(path: Path) -> bool:
    try:
        # NFS takes an exclusive lock only on what is open for writing.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
