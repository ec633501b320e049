"""Nodes sorted by how many NPUs they have left, so that the best fit is found without looking at each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping


class Shelf:
    """Counts of NPUs by node."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = dict(counts)
        self._nodes: dict[int, list[str]] = {}
        for node, count in sorted(counts.items()):
            self._nodes.setdefault(count, []).append(node)

    @property
    def counts(self) -> dict[str, int]:
        """By node."""
        return dict(self._counts)

    def count(self, node: str) -> int:
        """Of one node."""
        return self._counts[node]

    def put(self, node: str, count: int) -> None:
        """Change one node's count."""
        before = self._counts[node]
        if before == count:
            return
        members = self._nodes[before]
        del members[bisect_left(members, node)]
        if not members:
            del self._nodes[before]
        self._counts[node] = count
        insort(self._nodes.setdefault(count, []), node)

    def best_fit(self, npus: int) -> str | None:
        """The node where the least is left over once it gives `npus`, the first by name among equals."""
        count = min((c for c in self._nodes if c >= npus), default=None)
        return None if count is None else self._nodes[count][0]
