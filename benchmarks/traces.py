"""Request traces in Mooncake's format: one JSON object a line, `hash_ids` naming the blocks of each prompt by content and prefix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_LINE_CHARS = 64 * 1024 * 1024


class TraceRequest(BaseModel):
    """A request of a trace. Fields beyond these are ignored: releases of the format add some."""

    model_config = ConfigDict(frozen=True)

    timestamp: float = Field(default=0, ge=0, allow_inf_nan=False, description="Milliseconds since the trace's start.")
    input_length: int = Field(default=0, ge=0, description="Tokens of the prompt.")
    output_length: int = Field(default=0, ge=0, description="Tokens of the answer.")
    hash_ids: list[Annotated[int, Field(ge=0, lt=2**63)]]


class TraceError(Exception):
    """A trace that cannot be read; names file, line and remedy."""


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests in the order of their time. Where the trace has no times, they come one second apart. Raises TraceError."""
    requests = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    requests.append(_parse(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path}: {error}: give a file in Mooncake's format") from error
    if not any(request.hash_ids for request in requests):
        raise TraceError(f"trace {path}: no request has hash_ids: give a file in Mooncake's format")
    if requests[0].timestamp == requests[-1].timestamp:
        return [request.model_copy(update={"timestamp": 1000.0 * index}) for index, request in enumerate(requests)]
    return sorted(requests, key=lambda request: request.timestamp)


def _parse(path: Path, number: int, line: str) -> TraceRequest:
    try:
        return TraceRequest.model_validate(json.loads(line[:MAX_LINE_CHARS]))
    except (json.JSONDecodeError, ValidationError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"trace {path}, line {number}: {reason[:200]}: give a file in Mooncake's format") from error


def die(error: TraceError) -> None:
    """End the process with one line on stderr."""
    print(error, file=sys.stderr)
    raise SystemExit(1)
