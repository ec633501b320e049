"""What happens to a request between its head and the doors: who asks, for what, in which class, within which limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from npufleet_api.contract import CLASS_HEADER, DEADLINE_HEADER
from npufleet_gateway.admission import Entry
from npufleet_gateway.asgi import Headers
from npufleet_gateway.classification import Classification, Shape, answer_tokens, bounded_priority, classify_request, deadline_seconds
from npufleet_gateway.entitlement import ClassPolicy
from npufleet_gateway.errors import bad_request
from npufleet_gateway.keys import ApiKey, KeyRing, RateLimits, require_model
from npufleet_gateway.routing import ModelRoute

CLASS = CLASS_HEADER.encode()
DEADLINE = DEADLINE_HEADER.encode()


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request's body the entrance judges."""

    max_tokens: object = None
    max_completion_tokens: object = None
    priority: object = None
    streams: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go to the doors; `body` is what its replica gets."""

    entry: Entry
    classification: Classification
    body: bytes
    key: ApiKey | None


class Entrance:
    """Keys, limits and classes of a gateway."""

    def __init__(self, keys: KeyRing, limits: RateLimits, classes: Callable[[], Mapping[str, ClassPolicy]]) -> None:
        self.keys = keys
        self._limits = limits
        self._classes = classes

    def identify(self, headers: Headers) -> ApiKey | None:
        """Who asks. Raises ApiError (401)."""
        return self.keys.identify(headers)

    def enter(self, key: ApiKey | None, route: ModelRoute, headers: Headers, asked: Asked, body: bytes) -> Admitted:
        """Judge a request. Raises ApiError: 400, 403, and 429 for the key's own limits."""
        require_model(key, route)
        classes = self._classes()
        shape = Shape(len(body), answer_tokens(asked.max_completion_tokens, asked.max_tokens), asked.streams)
        header = _header(headers, CLASS)
        classification = classify_request(
            key_class=key.class_name if key is not None else None,
            key_claims=key.claims if key is not None else (),
            header=None if header is None else header.decode("latin-1"),
            model_class=route.model.workload_class,
            shape=shape,
            classes=classes,
        )
        wait = deadline_seconds(_header(headers, DEADLINE))
        body = _bounded(body, asked.priority, classes.get(classification.name))
        self._limits.take(key)
        flow = key.name if key is not None else ""
        return Admitted(Entry(route.model.key, classification.name, flow, shape.cost, wait), classification, body, key)

    def spend(self, key: ApiKey | None, tokens: int) -> None:
        """Count the tokens of an answered request."""
        self._limits.spend(key, tokens)


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _bounded(body: bytes, priority: object, policy: ClassPolicy | None) -> bytes:
    """The body with its `priority` within what its class may ask for. Untouched where it is."""
    if priority is None or priority == 0:
        return body
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise bad_request("priority must be an integer; smaller is sooner.", "priority")
    bounded = bounded_priority(priority, policy)
    if bounded == priority:
        return body
    return json.dumps({**json.loads(body), "priority": bounded}, separators=(",", ":")).encode()
