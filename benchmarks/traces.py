"""Request traces: Mooncake's JSON lines, whose `hash_ids` name the blocks of each prompt by content and prefix, and Azure's CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
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


def read_any_trace(path: Path) -> list[TraceRequest]:
    """A trace in Mooncake's format, or Azure's if the file's name ends in .csv; the latter has no hash_ids. Raises TraceError."""
    return list(_azure(path)) if path.suffix == ".csv" else read_trace(path)


def _azure(path: Path) -> Iterator[TraceRequest]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first: datetime | None = None
            for row in csv.DictReader(file):
                # Seven digits of a second's fraction, of which Python reads six.
                time = datetime.fromisoformat(row["TIMESTAMP"][:26])
                first = first or time
                yield TraceRequest(
                    timestamp=1000 * (time - first).total_seconds(),
                    input_length=int(row["ContextTokens"]),
                    output_length=int(row["GeneratedTokens"]),
                    hash_ids=[],
                )
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"trace {path}: {error}: give a CSV with the columns {', '.join(AZURE_COLUMNS)}") from error
    if first is None:
        raise TraceError(f"trace {path}: no request: give a CSV with the columns {', '.join(AZURE_COLUMNS)}")


def _parse(path: Path, number: int, line: str) -> TraceRequest:
    try:
        return TraceRequest.model_validate(json.loads(line[:MAX_LINE_CHARS]))
    except (json.JSONDecodeError, ValidationError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise TraceError(f"trace {path}, line {number}: {reason[:200]}: give a file in Mooncake's format") from error


def die(error: TraceError) -> NoReturn:
    """End the process with one line on stderr."""
    print(error, file=sys.stderr)
    raise SystemExit(1)
