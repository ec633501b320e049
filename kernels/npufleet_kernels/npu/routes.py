"""What is computed by another path than the NPU's operator, said once."""

from __future__ import annotations

import logging
from functools import lru_cache

from npufleet_kernels.errors import UnsupportedCallError

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def _say(operation: str, path: str, reason: str) -> None:
    logger.warning("npu operator not used", extra={"operation": operation, "path": path, "reason": reason})


def take_other(operation: str, path: str, error: UnsupportedCallError) -> None:
    """Log that `operation` goes by `path`, once for each reason. Empty calls, of which a step without tokens is made, are not told."""
    reason = str(error)
    if not reason.endswith("is empty"):
        _say(operation, path, reason)
