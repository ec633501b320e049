"""Request traces: Mooncake's JSON lines and the CSV of the Azure LLM inference traces. Parsed once, refused with line and field."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_operator.errors import InputError

Tokens = Annotated[int, Field(ge=0, le=10**8)]
MAX_REQUESTS = 5_000_000
MAX_LINE_CHARS = 16 * 1024 * 1024
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_TIME_CHARS = 26
"""Azure writes seven digits of a second's fraction, of which Python reads six."""
FORMATS = f"Mooncake JSON lines (timestamp, input_length, output_length) or a CSV with {', '.join(AZURE_COLUMNS)}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """An arrival, in seconds since the trace's first. Both counts are at least 1."""

    seconds: float
    input_tokens: int
    output_tokens: int


class _Mooncake(BaseModel):
    """One line; `hash_ids` and whatever else releases add is ignored."""

    model_config = ConfigDict(extra="ignore")

    timestamp: Annotated[float, Field(ge=0, le=10**13, allow_inf_nan=False)]
    input_length: Tokens
    output_length: Tokens


class _Azure(BaseModel):
    model_config = ConfigDict(extra="ignore")

    time: datetime = Field(alias="TIMESTAMP")
    context: Tokens = Field(alias="ContextTokens")
    generated: Tokens = Field(alias="GeneratedTokens")


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests in the order of their time, the first at 0. The format follows from the first line. Raises InputError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(MAX_LINE_CHARS)
            file.seek(0)
            rows = list(_mooncake(path, file) if first.lstrip().startswith("{") else _azure(path, file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {path}: {error}: give a file of {FORMATS}") from error
    if not rows:
        raise InputError(f"trace {path}: no request in it: give a file of {FORMATS}")
    rows.sort(key=lambda row: row[0])
    start = rows[0][0]
    return [TraceRequest(time - start, max(1, prompt), max(1, answer)) for time, prompt, answer in rows]


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[tuple[float, int, int]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        _bounded(path, number, line)
        try:
            row = _Mooncake.model_validate(json.loads(line))
        except ValidationError as error:
            raise _refused(path, number, error) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"trace {path}, line {number}: not JSON: {str(error)[:200]}: give {FORMATS}") from error
        yield row.timestamp / 1000, row.input_length, row.output_length


def _azure(path: Path, lines: Iterable[str]) -> Iterator[tuple[float, int, int]]:
    reader = csv.DictReader(lines)
    missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(f"trace {path}, line 1: no column {', '.join(missing)}: give {FORMATS}")
    try:
        for row in reader:
            _bounded(path, reader.line_num, "")
            try:
                parsed = _Azure.model_validate(_shortened(row))
            except ValidationError as error:
                raise _refused(path, reader.line_num, error) from error
            yield parsed.time.timestamp(), parsed.context, parsed.generated
    except csv.Error as error:
        raise InputError(f"trace {path}, line {reader.line_num}: {error}: give {FORMATS}") from error


def _shortened(row: dict[str | Any, Any]) -> dict[str, Any]:
    time = row["TIMESTAMP"]
    zone = "" if time is None or "+" in time or time.endswith("Z") else "+00:00"
    cut = time[:AZURE_TIME_CHARS] + zone if time is not None and zone else time
    return {**{name: row[name] for name in AZURE_COLUMNS}, "TIMESTAMP": cut}


def _bounded(path: Path, number: int, line: str) -> None:
    if number > MAX_REQUESTS or len(line) > MAX_LINE_CHARS:
        raise InputError(
            f"trace {path}, line {number}: at most {MAX_REQUESTS} lines of {MAX_LINE_CHARS} characters are read: give a part of the trace"
        )


def _refused(path: Path, number: int, error: ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "line"
    return InputError(f"trace {path}, line {number}: {where}: {first['msg']} (found {str(first['input'])[:100]!r}): give {FORMATS}")
