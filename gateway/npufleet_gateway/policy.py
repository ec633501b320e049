"""What the gateway needs of its InferencePool, the classes and what they are entitled to; and how many fellow gateways there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from npufleet_api.contract import COMPONENT_LABEL, POOL_NAME_ANNOTATION
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus
from npufleet_gateway.entitlement import ClassPolicy
from npufleet_gateway.reflector import Store

logger = logging.getLogger(__name__)

GATEWAY_COMPONENT = "gateway"


def class_policies(spec: InferencePoolSpec, status: InferencePoolStatus) -> dict[str, ClassPolicy]:
    """Classes by name.

    Shares are those of the spec, since slots are finer than whole NPUs; where the ledger guarantees fewer NPUs than they come to (failed
    cards make guarantees shrink), the ledger's.
    """
    ledger = {entry.name: entry for entry in status.classes}
    found = {}
    for one in spec.classes:
        share = one.min_percent / 100
        entry = ledger.get(one.name)
        if entry is not None and status.nominal > 0 and entry.guaranteed < one.min_percent * status.nominal // 100:
            share = entry.guaranteed / status.nominal
        found[one.name] = ClassPolicy(one.name, one.priority, share, one.max_percent / 100, one.claimable)
    return found


class PoolStore:
    """The pool by its name. One that cannot be parsed, or is gone, leaves the last good classes: traffic goes on."""

    def __init__(self, pool: str, changed: Callable[[], None] | None = None) -> None:
        self._pool = pool
        self._changed = changed
        self.classes: Mapping[str, ClassPolicy] = {}
        self.unparsable = 0

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Take the result of a list."""
        for raw in items:
            self._take(raw)

    def apply(self, event: str, raw: dict[str, Any]) -> None:
        """Take one watch event."""
        if event != "DELETED":
            self._take(raw)

    def _take(self, raw: dict[str, Any]) -> None:
        metadata = raw.get("metadata")
        if not isinstance(metadata, dict) or metadata.get("name") != self._pool:
            return
        try:
            found = class_policies(
                InferencePoolSpec.model_validate(raw.get("spec")), InferencePoolStatus.model_validate(raw.get("status") or {})
            )
        except ValidationError as error:
            self.unparsable = 1
            first = error.errors(include_url=False, include_input=False)[0]
            logger.warning("pool %s: %s: %s", self._pool, ".".join(map(str, first["loc"])), first["msg"])
            return
        self.unparsable = 0
        if found != self.classes:
            self.classes = found
            if self._changed is not None:
                self._changed()


class FellowStore:
    """The ready gateways of the pool, from the Pods that are watched anyway."""

    def __init__(self, pool: str, own_name: str) -> None:
        self._pool = pool
        self._own_name = own_name
        self._ready: set[str] = set()

    @property
    def gateways(self) -> int:
        """Gateways that share the pool's traffic, this one included."""
        return max(1, len(self._ready | {self._own_name}) if self._ready else 1)

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Take the result of a list."""
        self._ready = {name for raw in items if (name := self._ready_name(raw)) is not None}

    def apply(self, event: str, raw: dict[str, Any]) -> None:
        """Take one watch event."""
        name = _name(raw)
        if name is None:
            return
        if event != "DELETED" and self._ready_name(raw) is not None:
            self._ready.add(name)
        else:
            self._ready.discard(name)

    def _ready_name(self, raw: dict[str, Any]) -> str | None:
        metadata, status = raw.get("metadata"), raw.get("status")
        if not isinstance(metadata, dict) or not isinstance(status, dict) or metadata.get("deletionTimestamp") is not None:
            return None
        labels, annotations = metadata.get("labels"), metadata.get("annotations")
        if not isinstance(labels, dict) or labels.get(COMPONENT_LABEL) != GATEWAY_COMPONENT:
            return None
        if not isinstance(annotations, dict) or annotations.get(POOL_NAME_ANNOTATION) != self._pool:
            return None
        conditions = status.get("conditions")
        ready = isinstance(conditions, list) and any(
            isinstance(one, dict) and one.get("type") == "Ready" and one.get("status") == "True" for one in conditions
        )
        return _name(raw) if ready else None


class Tee:
    """One watch that fills several stores."""

    def __init__(self, *stores: Store) -> None:
        self._stores = stores

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Take the result of a list."""
        for store in self._stores:
            store.replace(items)

    def apply(self, event: str, raw: dict[str, Any]) -> None:
        """Take one watch event."""
        for store in self._stores:
            store.apply(event, raw)


def _name(raw: dict[str, Any]) -> str | None:
    metadata = raw.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None
