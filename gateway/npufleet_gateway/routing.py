"""Routing table: which names lead to which model, and which replicas may serve it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from npufleet_api.slo import SloTargets

ModelKey = tuple[str, str]
"""Namespace and name of an AscendModel."""


class ReplicaState(StrEnum):
    """Why a replica gets traffic, or none."""

    READY = "ready"
    STARTING = "starting"
    DRAINING = "draining"
    TERMINATING = "terminating"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Model:
    """An AscendModel of the pool, as far as the gateway needs it. `created` is its RFC 3339 creationTimestamp."""

    namespace: str
    name: str
    uid: str
    created: str
    served_name: str
    workload_class: str
    slo: SloTargets = field(default_factory=SloTargets)

    @property
    def key(self) -> ModelKey:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def qualified_name(self) -> str:
        """namespace/name: routes to this model whatever served names others claim."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Replica:
    """An inference pod. `ip` is empty until the pod has one."""

    namespace: str
    pod_name: str
    pod_uid: str
    model_name: str
    owner_uids: frozenset[str]
    ip: str
    state: ReplicaState

    @property
    def model_key(self) -> ModelKey:
        """Namespace and name of the model that the pod serves."""
        return self.namespace, self.model_name

    @property
    def ready(self) -> bool:
        """Whether the replica gets new requests."""
        return self.state is ReplicaState.READY

    @property
    def host(self) -> str:
        """The pod's address as it stands in a URL."""
        return f"[{self.ip}]" if ":" in self.ip else self.ip


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A model, the name that clients see, and its replicas."""

    model: Model
    public_name: str
    """The served name, or namespace/name where an older model keeps the served name."""
    replicas: tuple[Replica, ...]
    ready: tuple[Replica, ...]

    def states(self) -> str:
        """How many replicas are in which state, for people."""
        counts = Counter(replica.state for replica in self.replicas)
        return ", ".join(f"{counts[state]} {state.value}" for state in ReplicaState if counts[state]) or "no replica exists"


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All routes of the pool at one moment."""

    routes: tuple[ModelRoute, ...] = ()
    by_name: Mapping[str, ModelRoute] = field(default_factory=dict)

    def find(self, name: str) -> ModelRoute | None:
        """The route of a served name or of namespace/name, either with an adapter behind a colon (see `adapter_of`)."""
        route = self.by_name.get(name)
        return route if route is not None else self.by_name.get(name.rpartition(":")[0])


def adapter_of(name: str, route: ModelRoute) -> str:
    """The adapter that a client's model name asks for: what stands behind the last colon of `base:adapter`; empty for the model itself."""
    return "" if name in (route.public_name, route.model.qualified_name) else name.rpartition(":")[2]


def build_table(models: Iterable[Model], replicas: Iterable[Replica]) -> RoutingTable:
    """Routes of all models, in order of age.

    A served name belongs to the oldest model that claims it (creationTimestamp, then namespace/name), and never hides another
    model's namespace/name. A replica counts only if it is owned by the very AscendModel that stands under its name now.
    """
    ordered = sorted(models, key=lambda m: (m.created, m.namespace, m.name))
    by_key = {model.key: model for model in ordered}
    members: dict[ModelKey, list[Replica]] = {model.key: [] for model in ordered}
    for replica in replicas:
        owner = by_key.get(replica.model_key)
        if owner is not None and owner.uid in replica.owner_uids:
            members[owner.key].append(replica)
    qualified = {model.qualified_name: model for model in ordered}
    names: dict[str, ModelRoute] = {}
    routes: list[ModelRoute] = []
    for model in ordered:
        hidden = model.served_name in names or qualified.get(model.served_name, model) is not model
        own = tuple(sorted(members[model.key], key=lambda r: r.pod_name))
        route = ModelRoute(
            model=model,
            public_name=model.qualified_name if hidden else model.served_name,
            replicas=own,
            ready=tuple(replica for replica in own if replica.ready),
        )
        routes.append(route)
        names[route.public_name] = route
        names[model.qualified_name] = route
    return RoutingTable(routes=tuple(routes), by_name=names)
