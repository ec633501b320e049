"""What the watches delivered, and what our own writes returned: the operator's picture of the cluster.

The newer resource version wins, so that a late watch event does not undo what a write has just returned, and neither the answer to a
write nor a list that was on its way brings back what was deleted meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from npufleet_api.contract import COMPONENT_LABEL, MANAGED_BY, MANAGED_BY_LABEL, POOL_LABEL, POOL_NAME_ANNOTATION
from npufleet_api.model import AscendModelStatus
from npufleet_api.pool import InferencePoolStatus
from npufleet_operator.core.actions import ObjectId
from npufleet_operator.core.naming import slug
from npufleet_operator.core.observed import ModelKey, ModelView, NodeView, PodView, PoolView
from npufleet_operator.shell.kinds import MODEL, NAMESPACE, NODE, POD, POOL, Kind
from npufleet_operator.shell.parse import Json, model_view, node_view, pod_view, pool_view


@dataclass(frozen=True, slots=True)
class Version:
    """Which object, in which state."""

    uid: str
    number: int


@dataclass(frozen=True, slots=True)
class Child:
    """An owned object as it is, without managed fields."""

    body: Mapping[str, Any]
    uid: str
    owner_uid: str
    pool: str
    """Pool of a gateway object; empty for a model's."""


REMEMBERED_GONE = 4096
"""Deleted objects whose late answers are still told apart: far more than can be under way at once."""

ALL_POOLS = "*"
Listener = Callable[[str], None]
"""Called with the name of a pool to plan again, or ALL_POOLS."""


class Mirror:
    """Not thread-safe: used on the event loop only."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolView] = {}
        self.models: dict[ModelKey, ModelView] = {}
        self.pods: dict[tuple[str, str], PodView] = {}
        self.nodes: dict[str, NodeView] = {}
        self.namespaces: dict[str, Mapping[str, str]] = {}
        self.children: dict[ObjectId, Child] = {}
        self._versions: dict[ObjectId, Version] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()
        """UIDs of deleted objects, with the version up to which what is told of them is late. An object that only left a watch's
        selector comes back with its UID and a later version."""
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` which pools may need another plan."""
        self._listeners.append(listener)

    def replan_all(self) -> None:
        """Something that every plan depends on has changed."""
        self._notify([ALL_POOLS])

    def version(self, identity: ObjectId) -> Version | None:
        """What is known of one object."""
        return self._versions.get(identity)

    def known(self, kind: Kind) -> list[tuple[ObjectId, Version]]:
        """Every object of a kind."""
        return [(identity, version) for identity, version in self._versions.items() if identity[0] == kind.kind]

    def upsert(self, kind: Kind, raw: Json) -> bool:
        """Take an object in, unless it is older than what is known. True if it was news."""
        identity, version = identify(kind, raw), version_of(raw)
        known = self._versions.get(identity)
        if known and known.uid == version.uid and known.number >= version.number:
            return False
        if known and known.uid != version.uid and known.number > version.number:
            return False
        if version.number <= self._gone.get(version.uid, -1):
            return False
        self._versions[identity] = version
        self._notify(self._store(kind, identity, raw))
        return True

    def remove(self, kind: Kind, raw: Json) -> None:
        """Forget an object that was deleted, unless another one of its name is known."""
        identity = identify(kind, raw)
        known, deleted = self._versions.get(identity), version_of(raw)
        self._remember_gone(deleted)
        if known and known.uid == deleted.uid:
            self.forget(kind, identity)

    def _remember_gone(self, version: Version) -> None:
        if not version.uid:
            return
        self._gone[version.uid] = max(version.number, self._gone.get(version.uid, -1))
        self._gone.move_to_end(version.uid)
        if len(self._gone) > REMEMBERED_GONE:
            self._gone.popitem(last=False)

    def forget(self, kind: Kind, identity: ObjectId, *, deleted: bool = True) -> None:
        """Forget an object that no longer exists or, not `deleted`, that cannot be seen for now."""
        version = self._versions.pop(identity)
        if deleted:
            self._remember_gone(version)
        _, namespace, name = identity
        if kind is POOL:
            self.pools.pop(name, None)
            self._notify([name])
        elif kind is MODEL:
            gone = self.models.pop((namespace, name), None)
            self._notify([gone.pool_name] if gone else [])
        elif kind is POD:
            pod = self.pods.pop((namespace, name), None)
            self._notify(self._pools_of(pod) if pod else [])
        elif kind is NODE:
            self.nodes.pop(name, None)
            self._notify([ALL_POOLS])
        elif kind is NAMESPACE:
            self.namespaces.pop(name, None)
        else:
            child = self.children.pop(identity, None)
            self._notify(self._pools_of_child(child) if child else [])

    def _store(self, kind: Kind, identity: ObjectId, raw: Json) -> Iterable[str]:
        """Store the view; return the pools to plan again. Changes that planning does not read wake nobody."""
        _, namespace, name = identity
        if kind is POOL:
            before = self.pools.get(name)
            pool = pool_view(raw, before)
            self.pools[name] = pool
            return [name] if before is None or _without_status(pool) != _without_status(before) else []
        if kind is MODEL:
            old = self.models.get((namespace, name))
            model = model_view(raw, old)
            self.models[(namespace, name)] = model
            if old and replace(model, status=AscendModelStatus()) == replace(old, status=AscendModelStatus()):
                return []
            return {model.pool_name, old.pool_name if old else model.pool_name}
        if kind is POD:
            return self._store_pod(raw)
        if kind is NODE:
            node, previous = node_view(raw), self.nodes.get(name)
            self.nodes[name] = node
            return [] if node == previous else [ALL_POOLS]
        if kind is NAMESPACE:
            labels = raw["metadata"].get("labels") or {}
            changed = labels != self.namespaces.get(name)
            self.namespaces[name] = labels
            return [ALL_POOLS] if changed else []
        return self._store_child(identity, raw)

    def _store_pod(self, raw: Json) -> Iterable[str]:
        pod = pod_view(raw)
        before = self.pods.get(pod.key)
        if not pod.owner_name and not pod.requests and pod.labels.get(MANAGED_BY_LABEL) != MANAGED_BY:
            self.pods.pop(pod.key, None)
            return self._pools_of(before) if before else []
        self.pods[pod.key] = pod
        return [] if pod == before else self._pools_of(pod)

    def _store_child(self, identity: ObjectId, raw: Json) -> Iterable[str]:
        metadata = raw["metadata"]
        owners = metadata.get("ownerReferences") or []
        child = Child(
            body={**raw, "metadata": {key: value for key, value in metadata.items() if key != "managedFields"}},
            uid=metadata["uid"],
            owner_uid=owners[0]["uid"] if owners else "",
            pool=(metadata.get("annotations") or {}).get(POOL_NAME_ANNOTATION, "") if not owners else "",
        )
        self.children[identity] = child
        return self._pools_of_child(child)

    def _pools_of(self, pod: PodView) -> Iterable[str]:
        if not pod.owner_name:
            if pod.labels.get(COMPONENT_LABEL) and not pod.requests:
                return []
            return [name for name, pool in self.pools.items() if pool.spec and pool.spec.npus.resource_name in pod.requests]
        return self._pools_of_owned(pod.owner_uid, pod.labels)

    def _pools_of_child(self, child: Child) -> Iterable[str]:
        pools = self._pools_of_owned(child.owner_uid, child.body["metadata"].get("labels") or {})
        return pools | {child.pool} if child.pool else pools

    def _pools_of_owned(self, owner_uid: str, labels: Mapping[str, str]) -> set[str]:
        """The pool of the owning model, and the one that the object was made in: they differ while a model moves, or once it is gone."""
        owners = {model.pool_name for model in self.models.values() if model.uid == owner_uid}
        label = labels.get(POOL_LABEL)
        return owners | {name for name in self.pools if slug(name) == label}

    def _notify(self, pools: Iterable[str]) -> None:
        for pool in set(pools):
            for listener in self._listeners:
                listener(pool)


def identify(kind: Kind, raw: Json) -> ObjectId:
    """Kind, namespace and name; the kind comes from the caller, since items of a list do not carry it."""
    metadata = raw["metadata"]
    return (kind.kind, metadata.get("namespace", ""), metadata["name"])


def version_of(raw: Json) -> Version:
    """UID and resource version. Resource versions are ordered numbers since Kubernetes 1.35 says so, and have always been in etcd."""
    metadata = raw["metadata"]
    number = str(metadata.get("resourceVersion", "0"))
    return Version(metadata.get("uid", ""), int(number) if number.isdigit() else 0)


def _without_status(pool: PoolView) -> PoolView:
    return replace(pool, status=InferencePoolStatus())
