"""NPUs of a pool: nominal, supply, foreign, and what is free on which node, now and once all that leaves is gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npufleet_api.contract import POOL_LABEL
from npufleet_api.pool import InferencePoolSpec, NpuSelection
from npufleet_operator.core.naming import slug
from npufleet_operator.core.observed import ModelView, NodeView, PodView, RivalPool
from npufleet_operator.core.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Capacity:
    """NPUs, as of section "Guarantees" in the architecture document."""

    nominal: int
    """Capacity of the matching nodes, healthy or not."""
    supply: int
    """Allocatable of ready, schedulable nodes, less foreign."""
    foreign: int
    unhealthy: Mapping[str, int]
    """NPUs that a ready node has but cannot allocate, by node."""
    out: tuple[str, ...]
    """Matching nodes that are not ready or not schedulable."""
    free: Mapping[str, int]
    """NPUs that no pod holds, by ready and schedulable node."""
    headroom: int
    """Supply less what is charged to it: below the sum of `free` where failed cards leave a node with more promised than it has."""
    largest_node: int
    """NPUs of the largest matching node: what one replica can have at most."""
    prospect: Mapping[str, int]
    """What will be free on each usable node once all that leaves is gone; negative where failed cards leave too few for what stays."""
    prospect_headroom: int
    """The same for the whole supply."""
    reserved: Mapping[str, str]
    """Node whose NPUs are kept for a created, not yet scheduled pod, by UID."""


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether `labels` carry everything that `selector` asks for."""
    return all(labels.get(key) == value for key, value in selector.items())


def _matches(npus: NpuSelection, node: NodeView) -> bool:
    return node.capacity.get(npus.resource_name, 0) > 0 and selects(npus.node_selector, node.labels)


def pool_nodes(spec: InferencePoolSpec, nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """Nodes whose NPUs the pool selects, by name."""
    return tuple(sorted((n for n in nodes if _matches(spec.npus, n)), key=lambda n: n.name))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Nodes that several pools select. A node belongs to the pool that was created first, then to the first by name."""

    lost: Mapping[str, str]
    """Pool that owns the node instead, by name of node."""
    contested: Mapping[str, str]
    """First other pool that selects one of ours, by name of node."""


def sharing(pool: RivalPool, nodes: Sequence[NodeView], rivals: Sequence[RivalPool]) -> Sharing:
    """Which of the nodes that `pool` selects are selected by others of the same resource too."""
    near = sorted((r for r in rivals if r.npus.resource_name == pool.npus.resource_name), key=lambda r: (r.created, r.name))
    lost: dict[str, str] = {}
    contested: dict[str, str] = {}
    for node in nodes if near else ():
        first = next((r for r in near if _matches(r.npus, node)), None) if _matches(pool.npus, node) else None
        if first is None:
            continue
        book = lost if (first.created, first.name) < (pool.created, pool.name) else contested
        book[node.name] = first.name
    return Sharing(lost, contested)


def is_ours(pod: PodView, pool: str, models: Mapping[str, ModelView]) -> bool:
    """Whether the pod is charged to this pool: owned by one of its models, or left behind by one that is gone or has moved."""
    model = models.get(pod.owner_uid)
    if model is not None:
        return model.namespace == pod.namespace
    return bool(pod.owner_name) and pod.labels.get(POOL_LABEL) == slug(pool)


def leaving(pod: PodView) -> bool:
    """The pod drains or terminates: its NPUs come free."""
    return pod.terminating or pod.drain_started is not None


def capacity(
    spec: InferencePoolSpec, pool: str, nodes: Sequence[NodeView], pods: Sequence[PodView], models: Mapping[str, ModelView]
) -> Capacity:
    """The pool's NPUs. `models` by UID; `nodes` without those that belong to other pools."""
    resource = spec.npus.resource_name
    members = pool_nodes(spec, nodes)
    by_name = {node.name: node for node in members}
    usable = [node for node in members if node.ready and node.schedulable]
    held: dict[str, int] = {}
    foreign: dict[str, int] = {}
    going: dict[str, int] = {}
    waiting: list[PodView] = []
    for pod in sorted(pods, key=lambda p: p.key):
        npus = pod.requests.get(resource, 0)
        if npus <= 0 or pod.finished:
            continue
        ours = is_ours(pod, pool, models)
        if pod.node in by_name:
            book = held if ours else foreign
            book[pod.node] = book.get(pod.node, 0) + npus
            if ours and leaving(pod):
                going[pod.node] = going.get(pod.node, 0) + npus
        elif ours and not pod.node and not leaving(pod):
            waiting.append(pod)
    slack = {n.name: n.allocatable.get(resource, 0) - held.get(n.name, 0) - foreign.get(n.name, 0) for n in usable}
    free, placed, unplaced = _reserve(resource, {name: max(0, count) for name, count in slack.items()}, waiting)
    prospect = {name: free[name] + min(0, count) + going.get(name, 0) for name, count in slack.items()}
    prospect, later, _ = _reserve(resource, prospect, unplaced)
    supply = max(0, sum(n.allocatable.get(resource, 0) - foreign.get(n.name, 0) for n in usable))
    left = supply - sum(held.get(n.name, 0) for n in usable) - sum(pod.requests[resource] for pod in waiting)
    return Capacity(
        nominal=sum(node.capacity[resource] for node in members),
        supply=supply,
        foreign=sum(foreign.values()),
        unhealthy={
            n.name: n.capacity[resource] - n.allocatable.get(resource, 0)
            for n in members
            if n.ready and n.allocatable.get(resource, 0) < n.capacity[resource]
        },
        out=tuple(n.name for n in members if not (n.ready and n.schedulable)),
        free=free,
        headroom=max(0, left),
        largest_node=max((n.capacity[resource] for n in members), default=0),
        prospect=prospect,
        prospect_headroom=left + sum(going.get(n.name, 0) for n in usable),
        reserved={**placed, **later},
    )


def could_hold(capacity: Capacity, resource: str, npus: int, gone: Sequence[PodView]) -> bool:
    """Whether one node would have `npus` once all that leaves, and these pods too, are gone."""
    freed: dict[str, int] = {}
    for pod in gone:
        freed[pod.node] = freed.get(pod.node, 0) + pod.requests.get(resource, 0)
    return any(count + freed.get(name, 0) >= npus for name, count in capacity.prospect.items())


def _reserve(resource: str, free: Mapping[str, int], waiting: Sequence[PodView]) -> tuple[dict[str, int], dict[str, str], list[PodView]]:
    """Free NPUs less those that created, not yet scheduled pods will take: largest first, best fit. Then where each has its place, by
    UID, and what found none."""
    if not waiting:
        return dict(free), {}, []
    left = Shelf(free)
    placed: dict[str, str] = {}
    unplaced = []
    for pod in sorted(waiting, key=lambda p: (-p.requests[resource], p.key)):
        npus = pod.requests[resource]
        node = left.best_fit(npus)
        if node is None:
            unplaced.append(pod)
        else:
            left.put(node, left.count(node) - npus)
            placed[pod.uid] = node
    return left.counts, placed, unplaced
