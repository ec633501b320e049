"""What is computed by another path than the NPU's operator, said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from npufleet_kernels.errors import UnsupportedCallError

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@lru_cache(maxsize=1024)
def _say(operation: str, path: str, reason: str) -> None:
    logger.warning("npu operator not used", extra={"operation": operation, "path": path, "reason": reason})


def take_other(operation: str, path: str, error: UnsupportedCallError) -> None:
    """Log that `operation` goes by `path`, once for each reason. Empty calls, of which a step without tokens is made, are not told."""
    reason = str(error)
    if not reason.endswith("is empty"):
        _say(operation, path, reason)


def otherwise(
    operation: str, reference: Callable[Parameters, Result]
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorates a variant of `operation`: what its operators refuse goes to `reference`, and is told."""

    def decorate(variant: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(variant)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                return variant(*args, **kwargs)
            except UnsupportedCallError as error:
                take_other(operation, "reference", error)
                return reference(*args, **kwargs)

        return call

    return decorate
