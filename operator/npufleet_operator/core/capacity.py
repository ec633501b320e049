"""NPUs of a pool: nominal, supply, foreign, and what is free on which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npufleet_api.contract import POOL_LABEL
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.naming import slug
from npufleet_operator.core.observed import ModelView, NodeView, PodView


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


class Room:
    """Free NPUs, handed out during one plan. Best fit, so that large replicas keep whole nodes."""

    def __init__(self, free: Mapping[str, int], unit: int, headroom: int) -> None:
        self._free = {node: count - count % unit for node, count in free.items()}
        self._headroom = headroom

    def fits(self, npus: int) -> bool:
        """Whether one node has `npus` left, and the pool too."""
        return self._headroom >= npus and _best_fit(self._free, npus) is not None

    def take(self, npus: int) -> bool:
        """Take `npus` from the node where the least is left over; False, and nothing taken, if none has them."""
        node = _best_fit(self._free, npus)
        if node is None or self._headroom < npus:
            return False
        self._free[node] -= npus
        self._headroom -= npus
        return True


def _best_fit(free: Mapping[str, int], npus: int) -> str | None:
    """The node where the least is left over once it gives `npus`, the first by name among equals."""
    candidates = [(count, node) for node, count in free.items() if count >= npus]
    return min(candidates)[1] if candidates else None


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether `labels` carry everything that `selector` asks for."""
    return all(labels.get(key) == value for key, value in selector.items())


def pool_nodes(spec: InferencePoolSpec, nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """Nodes whose NPUs belong to the pool, by name."""
    resource = spec.npus.resource_name
    matching = (n for n in nodes if n.capacity.get(resource, 0) > 0 and selects(spec.npus.node_selector, n.labels))
    return tuple(sorted(matching, key=lambda n: n.name))


def is_ours(pod: PodView, pool: str, models: Mapping[str, ModelView]) -> bool:
    """Whether the pod is charged to this pool: owned by one of its models, or left behind by one that is gone or has moved."""
    model = models.get(pod.owner_uid)
    if model is not None:
        return model.namespace == pod.namespace
    return bool(pod.owner_name) and pod.labels.get(POOL_LABEL) == slug(pool)


def capacity(
    spec: InferencePoolSpec, pool: str, nodes: Sequence[NodeView], pods: Sequence[PodView], models: Mapping[str, ModelView]
) -> Capacity:
    """The pool's NPUs. `models` by UID."""
    resource = spec.npus.resource_name
    members = pool_nodes(spec, nodes)
    by_name = {node.name: node for node in members}
    usable = [node for node in members if node.ready and node.schedulable]
    held: dict[str, int] = {}
    foreign: dict[str, int] = {}
    waiting: list[int] = []
    for pod in sorted(pods, key=lambda p: p.key):
        npus = pod.requests.get(resource, 0)
        if npus <= 0 or pod.finished:
            continue
        ours = is_ours(pod, pool, models)
        if pod.node in by_name:
            book = held if ours else foreign
            book[pod.node] = book.get(pod.node, 0) + npus
        elif ours and not pod.node:
            waiting.append(npus)
    free = {n.name: max(0, n.allocatable.get(resource, 0) - held.get(n.name, 0) - foreign.get(n.name, 0)) for n in usable}
    free = _reserve(free, waiting)
    supply = max(0, sum(n.allocatable.get(resource, 0) - foreign.get(n.name, 0) for n in usable))
    return Capacity(
        nominal=sum(node.capacity[resource] for node in members),
        supply=supply,
        foreign=sum(foreign.values()),
        unhealthy={
            n.name: n.capacity[resource] - n.allocatable.get(resource, 0)
            for n in members
            if n.ready and n.allocatable.get(resource, 0) < n.capacity[resource]
        },
        out=tuple(n.name for n in members if n not in usable),
        free=free,
        headroom=max(0, supply - sum(held.get(n.name, 0) for n in usable) - sum(waiting)),
        largest_node=max((n.capacity[resource] for n in members), default=0),
    )


def _reserve(free: Mapping[str, int], waiting: Sequence[int]) -> dict[str, int]:
    """Free NPUs less those that created, not yet scheduled pods will take: largest first, best fit."""
    left = dict(free)
    for npus in sorted(waiting, reverse=True):
        node = _best_fit(left, npus)
        if node is not None:
            left[node] -= npus
    return left
