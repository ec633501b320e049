"""The gateway's view of the pool: a reducer of list and watch events to a routing table. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from npufleet_gateway.errors import ObjectError
from npufleet_gateway.objects import parse_model, parse_pod
from npufleet_gateway.routing import Model, Replica, RoutingTable, build_table

logger = logging.getLogger(__name__)

ObjectKey = tuple[str, str]
T = TypeVar("T")


def object_key(raw: dict[str, Any]) -> ObjectKey:
    """Namespace and name of an object of the API server. Raises ObjectError."""
    metadata = raw.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("namespace"), str) or not isinstance(metadata.get("name"), str):
        raise ObjectError("object without metadata.namespace and metadata.name")
    return metadata["namespace"], metadata["name"]


class ObjectStore(Generic[T]):
    """Objects of one kind by namespace and name.

    An object that cannot be parsed is counted and left out; where its last good form is known and is the same object (uid), that
    one stays: a field that a newer operator introduces must not cut traffic.
    """

    def __init__(self, parse: Callable[[dict[str, Any]], T | None], uid: Callable[[T], str], changed: Callable[[], None]) -> None:
        self._parse = parse
        self._uid = uid
        self._changed = changed
        self._objects: dict[ObjectKey, T] = {}
        self._unparsable: set[ObjectKey] = set()
        self.synced = False

    @property
    def objects(self) -> Iterable[T]:
        """All objects."""
        return self._objects.values()

    @property
    def unparsable(self) -> int:
        """Objects whose present form cannot be parsed."""
        return len(self._unparsable)

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Take the result of a list: what is not in it is gone."""
        before, self._objects = self._objects, {}
        self._unparsable = set()
        for raw in items:
            self._put(raw, before)
        self.synced = True
        self._changed()

    def apply(self, event: str, raw: dict[str, Any]) -> None:
        """Take one watch event (ADDED, MODIFIED or DELETED)."""
        if event == "DELETED":
            try:
                key = object_key(raw)
            except ObjectError as error:
                logger.warning("ignored deletion: %s", error)
                return
            gone = self._objects.pop(key, None)
            self._unparsable.discard(key)
            if gone is not None:
                self._changed()
        elif self._put(raw, self._objects):
            self._changed()

    def _put(self, raw: dict[str, Any], before: dict[ObjectKey, T]) -> bool:
        """True if what routing needs of the object has changed: most events are of no concern to it."""
        try:
            key = object_key(raw)
        except ObjectError as error:
            logger.warning("ignored object: %s", error)
            return False
        try:
            parsed = self._parse(raw)
        except ObjectError as error:
            logger.warning("unparsable: %s", error)
            self._unparsable.add(key)
            last_good = before.get(key)
            parsed = last_good if last_good is not None and self._uid(last_good) == raw["metadata"].get("uid") else None
        else:
            self._unparsable.discard(key)
        if parsed is None:
            return self._objects.pop(key, None) is not None
        changed = self._objects.get(key) != parsed
        self._objects[key] = parsed
        return changed


class ClusterView:
    """Models and pods of one pool. The table is rebuilt when it is next asked for after a change."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.models: ObjectStore[Model] = ObjectStore(lambda raw: parse_model(raw, pool), lambda m: m.uid, self._mark)
        self.pods: ObjectStore[Replica] = ObjectStore(lambda raw: parse_pod(raw, pool), lambda r: r.pod_uid, self._mark)
        self._table = RoutingTable()
        self._stale = False
        self._listeners: list[Callable[[RoutingTable], None]] = []
        self._on_change: list[Callable[[], None]] = []

    @property
    def synced(self) -> bool:
        """Whether both kinds were listed at least once."""
        return self.models.synced and self.pods.synced

    @property
    def table(self) -> RoutingTable:
        """The present routing table; empty until both kinds were listed once."""
        if self._stale and self.synced:
            self._stale = False
            self._table = build_table(self.models.objects, self.pods.objects)
            for listener in self._listeners:
                listener(self._table)
        return self._table

    def on_table(self, listener: Callable[[RoutingTable], None]) -> None:
        """Call `listener` with each new table, before it is first used."""
        self._listeners.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there is a new table to ask for."""
        self._on_change.append(listener)

    def _mark(self) -> None:
        self._stale = True
        for listener in self._on_change:
            listener()
