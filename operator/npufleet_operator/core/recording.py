"""Recorded inputs of the planner: one line of JSON per plan, which can be planned again elsewhere. Pure.

A line holds everything that `make_plan` was given, the digest of what it answered, and an outline of the answer for people:

    {"version": 1, "now": "2026-01-01T00:00:00+00:00", "digest": "sha256:…", "outline": {…}, "observed": {…}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from npufleet_operator.core.actions import Plan
from npufleet_operator.core.observed import ModelKey, Observed
from npufleet_operator.errors import RecordingError

VERSION = 1
KEY_SEPARATOR = "/"
"""Joins namespace and name where a mapping is keyed by model; neither can contain it."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded plan."""

    now: datetime
    observed: Observed
    digest: str
    outline: Mapping[str, list[str]]


def record(observed: Observed, now: datetime, plan: Plan) -> str:
    """One line of JSON, without the newline."""
    line = {"version": VERSION, "now": now.isoformat(), "digest": digest(plan), "outline": outline(plan), "observed": plain(observed)}
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse(line: str) -> Recording:
    """A recorded line. Raises RecordingError, which names the field."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise RecordingError("a line must be a JSON object")
    if raw.get("version") != VERSION:
        raise RecordingError(f"version: {raw.get('version')!r} is not understood, this release reads {VERSION}")
    return Recording(
        now=_field(datetime, "now", raw.get("now")),
        observed=_field(Observed, "observed", _split_keys(raw.get("observed"))),
        digest=_field(str, "digest", raw.get("digest")),
        outline=_field(dict[str, list[str]], "outline", raw.get("outline")),
    )


def _field(kind: Any, name: str, value: object) -> Any:
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RecordingError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from error


def digest(plan: Plan) -> str:
    """Equal for equal plans, whatever the order of what has none."""
    text = json.dumps(plain(plan), sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def outline(plan: Plan) -> dict[str, list[str]]:
    """What a plan does, in words that can be compared line by line."""
    return {
        "creates": [KEY_SEPARATOR.join((c.manifest["metadata"]["namespace"], c.manifest["metadata"]["name"])) for c in plan.creates],
        "drains": [f"{KEY_SEPARATOR.join(d.pod.key)} {d.reason.value}" for d in plan.drains],
        "cancels": [KEY_SEPARATOR.join(c.pod.key) for c in plan.cancels],
        "deletes": [f"{KEY_SEPARATOR.join(d.pod.key)} {d.reason.value}" for d in plan.deletes],
        "decisions": [f"{KEY_SEPARATOR.join(c.model)} {c.reason.value}: {c.message}" for c in plan.choices],
        "desired": [f"{KEY_SEPARATOR.join(key)} {status.desired_replicas}" for key, status in sorted(plan.model_status.items())],
    }


def plain(value: Any) -> Any:
    """Dataclasses, pydantic models, mappings, sets and sequences as JSON types; sets in order.

    Fields of pydantic models that were never set are left out: what a spec does not say, its copy must not say either.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {KEY_SEPARATOR.join(key) if isinstance(key, tuple) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value


def _split_keys(raw: object) -> object:
    if not isinstance(raw, dict):
        return raw
    return {name: _by_model(value) if name in _keyed_by_model() and isinstance(value, dict) else value for name, value in raw.items()}


def _by_model(raw: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    return {tuple(key.split(KEY_SEPARATOR)): value for key, value in raw.items()}


@cache
def _keyed_by_model() -> frozenset[str]:
    """Fields of Observed that are mappings by model."""
    hints = get_type_hints(Observed)
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is Mapping and get_args(hint)[0] == ModelKey)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
