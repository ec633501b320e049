"""Which workload class a request belongs to. Pure.

In this order: the class of its API key; the class that its header claims, where the pool lets anybody claim it or the key lists it; the
class of its model; and, where the pool does not have that class, its shape. A key that lists classes may choose among them by header.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from npufleet_gateway.entitlement import ClassPolicy
from npufleet_gateway.errors import ApiError, class_not_allowed, unknown_class

BYTES_PER_TOKEN = 4
"""Of English text under the tokenizers in use; only orders of magnitude matter here."""
INTERACTIVE_PROMPT_BYTES = 16 * 1024
INTERACTIVE_ANSWER_TOKENS = 2048
DEFAULT_ANSWER_TOKENS = 256
COST_TOKENS = 1024
"""Tokens that cost a flow as much as a request's own overhead."""


class ClassSource(StrEnum):
    """What decided."""

    KEY = "key"
    HEADER = "header"
    MODEL = "model"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request looks like before it is run."""

    body_bytes: int
    answer_tokens: int | None = None
    streams: bool = False

    @property
    def cost(self) -> float:
        """What the request takes of its flow's share, in requests."""
        return 1 + (self.body_bytes / BYTES_PER_TOKEN + (self.answer_tokens or DEFAULT_ANSWER_TOKENS)) / COST_TOKENS

    @property
    def interactive(self) -> bool:
        """Whether somebody is likely to be waiting for it."""
        answer = self.answer_tokens or DEFAULT_ANSWER_TOKENS
        return self.streams and self.body_bytes <= INTERACTIVE_PROMPT_BYTES and answer <= INTERACTIVE_ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Classification:
    """A request's class, and what decided it."""

    name: str
    source: ClassSource


def classify_request(
    *,
    key_class: str | None,
    key_claims: Collection[str],
    header: str | None,
    model_class: str,
    shape: Shape,
    classes: Mapping[str, ClassPolicy],
) -> Classification:
    """The request's class. `classes` are the pool's; while they are not known, the model's class stands.

    Raises ApiError: 400 for a header that names no class, 403 for one that may not be claimed.
    """
    if header is not None and header != key_class:
        if classes and header not in classes:
            raise unknown_class(header, classes)
        if header not in key_claims and (key_class is not None or header not in classes or not classes[header].claimable):
            raise class_not_allowed(header)
        return Classification(header, ClassSource.HEADER)
    if key_class is not None:
        return Classification(key_class, ClassSource.KEY)
    if model_class in classes or not classes:
        return Classification(model_class, ClassSource.MODEL)
    ordered = sorted(classes.values(), key=lambda policy: (-policy.priority, policy.name))
    return Classification(ordered[0 if shape.interactive else -1].name, ClassSource.SHAPE)


def bounded_priority(asked: int, policy: ClassPolicy | None) -> int:
    """A request's own `priority` (smaller is sooner, as engines have it), no sooner than its class's priority allows."""
    return max(asked, -policy.priority if policy is not None else 0)


def answer_tokens(*fields: object) -> int | None:
    """The first of a body's limits that is a positive number."""
    return next((field for field in fields if isinstance(field, int) and not isinstance(field, bool) and field > 0), None)


def deadline_seconds(header: bytes | None) -> float | None:
    """How long the client wants to wait for a slot, from its header in milliseconds. Raises ApiError (400)."""
    if header is None:
        return None
    if not header.isdigit() or len(header) > 9 or int(header) == 0:
        raise ApiError(
            400, "invalid_request_error", "invalid_deadline", "x-npufleet-deadline-ms must be a number of milliseconds, 1 or more."
        )
    return int(header) / 1000
