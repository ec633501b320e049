"""Free NPUs of a pool, handed out during one plan. Best fit, so that large replicas keep whole nodes."""

from __future__ import annotations

from npufleet_operator.core.capacity import Capacity
from npufleet_operator.core.shelf import Shelf


class Room:
    """What is free now, and what will be free once all that leaves is gone (the prospect). Counts are floored to whole units."""

    def __init__(self, capacity: Capacity, unit: int) -> None:
        self._unit = unit
        self._now = Shelf({node: count - count % unit for node, count in capacity.free.items()})
        self._headroom = capacity.headroom
        self._prospect = dict(capacity.prospect)
        self._prospect_headroom = capacity.prospect_headroom
        self._later = Shelf({node: self._whole(node) for node in self._prospect})

    def fits(self, npus: int) -> bool:
        """Whether one node has `npus` left, and the pool too."""
        return self._headroom >= npus and self._now.best_fit(npus) is not None

    def take(self, npus: int) -> str | None:
        """Take `npus` from the node where the least is left over, and name it; None, and nothing taken, if none has them."""
        node = self._now.best_fit(npus)
        if node is None or self._headroom < npus:
            return None
        left = self._now.count(node) - npus
        self._now.put(node, left - left % self._unit)
        self._headroom -= npus
        self._move(node, -npus)
        return node

    def expect(self, node: str, npus: int) -> None:
        """`npus` of the node leave by this plan; negative: they stay after all."""
        if node in self._prospect:
            self._move(node, npus)

    def claim(self, npus: int) -> bool:
        """Put `npus` of what will be free aside for a claim; what is free now on that node is kept for it too."""
        node = self._later.best_fit(npus)
        if node is None or self._prospect_headroom < npus:
            return False
        self._move(node, -npus)
        whole = max(0, self._whole(node))
        if whole < self._now.count(node):
            self._now.put(node, whole)
        self._headroom = min(self._headroom, max(0, self._prospect_headroom))
        return True

    def node_would_fit(self, npus: int, node: str, freed: int) -> bool:
        """Whether the node would have `npus` if `freed` left it."""
        count = self._prospect.get(node)
        return count is not None and (count + freed) - (count + freed) % self._unit >= npus

    def pool_would_fit(self, npus: int, freed: int) -> bool:
        """Whether the supply would have `npus` if `freed` left it."""
        return self._prospect_headroom + freed >= npus

    def in_sum(self) -> int:
        """NPUs that will be free on all nodes together."""
        return min(self._prospect_headroom, sum(max(0, count) for count in self._prospect.values()))

    def _whole(self, node: str) -> int:
        return self._prospect[node] - self._prospect[node] % self._unit

    def _move(self, node: str, npus: int) -> None:
        self._prospect[node] += npus
        self._prospect_headroom += npus
        self._later.put(node, self._whole(node))
