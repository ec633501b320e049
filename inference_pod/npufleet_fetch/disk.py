"""What a failing disk means, in words for whoever owns it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npufleet_fetch.errors import CacheFullError, CacheUnavailableError, FetchError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def meaning(error: OSError, where: Path) -> FetchError:
    """The error that stands for `error` at `where`."""
    reason = error.strerror or type(error).__name__
    if error.errno in FULL:
        return CacheFullError(f"model cache {where}: {reason}: free disk space, or lower spec.models.cache.sizeLimitGi of the pool")
    if error.errno in (errno.EACCES, errno.EPERM):
        return CacheUnavailableError(
            f"model cache {where}: {reason}: give all of it to user 65532 on the node, as in chown -R 65532:65532 DIRECTORY"
        )
    if error.errno == errno.EROFS:
        return CacheUnavailableError(
            f"model cache {where}: {reason}: mount it for writing, or name another in spec.models.cache of the pool"
        )
    return CacheUnavailableError(f"model cache {where}: {reason}: check the disk of this node")


@contextmanager
def at(where: Path) -> Iterator[None]:
    """Turn an OSError in the block into a FetchError about `where`."""
    try:
        yield
    except OSError as error:
        raise meaning(error, where) from error
