"""Structured logs: one JSON object per line, or text for a terminal."""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter


def configure_logging(level: str, style: str) -> None:
    """Log to standard error; `style` is json or text."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        fields = "{asctime}{levelname}{name}{message}"
        handler.setFormatter(JsonFormatter(fields, style="{", rename_fields={"asctime": "time", "levelname": "level", "name": "logger"}))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
