"""Structured logs: one JSON object a line on stdout. Never a prompt, never an answer."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter


def configure_logging(level: str, rank: int | None = None) -> None:
    """Send all logs, warnings of Python included, to stdout as JSON; those of a further tensor-parallel rank say which."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        JsonFormatter(
            "{levelname}{name}{message}",
            style="{",
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
            rename_fields_keep_missing=False,
            timestamp="time",
            static_fields=None if rank is None else {"rank": rank},
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Requests are logged by the middleware, with their ids.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
