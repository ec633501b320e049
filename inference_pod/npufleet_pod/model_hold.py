"""Keeps the cache from evicting the model that is served."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npufleet_api.fetching import CURRENT_LINK, IN_USE_FILE
from npufleet_pod.errors import ModelError


@contextmanager
def hold_model(path: Path) -> Iterator[None]:
    """Hold the model at `path` while the block runs; one that is not in a cache needs no holding. Raises ModelError where it is gone."""
    if path.name == CURRENT_LINK and path.is_symlink() and not path.exists():
        raise _dropped(path)
    try:
        fd = os.open(path / IN_USE_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # On a volume or in an image, nobody evicts it.
        yield
        return
    try:
        # The kernel ends the lock with the process. Whoever evicts holds it for a moment only.
        fcntl.flock(fd, fcntl.LOCK_SH)
        if not (path / IN_USE_FILE).exists():
            raise _dropped(path)
        yield
    finally:
        os.close(fd)


def _dropped(path: Path) -> ModelError:
    return ModelError(f"{path}: the cache has dropped the model since the pod started: delete the pod, so that it is fetched again")
