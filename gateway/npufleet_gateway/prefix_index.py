"""Which replica was sent which prefix: a bounded tree of prefix hashes that forgets what was used least recently. Pure.

It is a guess of what the replicas' own caches hold. Each mark carries the number of tokens that its replica had computed by then: a replica
whose KV memory is known to hold fewer tokens than it has computed since has, if it forgets in a similar order, no longer got it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_PREFIXES = 131_072
"""About 50 MB. At 25 hashes a prompt, the latest five thousand different prompts."""
SHARED_CHILDREN = 8
"""A prefix with so many different continuations is common to conversations (a system prompt, few-shot examples), not one conversation's."""
MAX_HOLDERS = 8
"""Replicas remembered for one prefix."""


class _Prefix:
    __slots__ = ("children", "holders", "parent")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.children = 0
        self.holders: dict[str, int] = {}
        """Pod UIDs and the tokens that each had computed when it was last sent this prefix; the latest last."""


class PrefixIndex:
    """Prefixes of all models: their hashes differ."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[int, _Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    def depths(self, hashes: Sequence[int], computed: dict[str, int], capacities: dict[str, int]) -> tuple[dict[str, int], int]:
        """How many of `hashes` each replica was sent, and how many of them are shared by conversations.

        `computed` are the tokens that each replica has computed by now, `capacities` those that its cache holds, where known.
        """
        found: dict[str, int] = {}
        shared = 0
        prefixes = self._prefixes
        for depth, name in enumerate(hashes, start=1):
            prefix = prefixes.get(name)
            if prefix is None:
                break
            for uid, mark in prefix.holders.items():
                capacity = capacities.get(uid)
                if found.get(uid, 0) == depth - 1 and (capacity is None or computed.get(uid, 0) - mark <= capacity):
                    found[uid] = depth
            if prefix.children >= SHARED_CHILDREN:
                shared = depth
        return found, shared

    def add(self, hashes: Sequence[int], pod_uid: str, computed: int) -> None:
        """`pod_uid`, which has computed `computed` tokens, is sent a prompt with these prefixes."""
        prefixes = self._prefixes
        parent: int | None = None
        for name in hashes:
            prefix = prefixes.get(name)
            if prefix is None:
                prefix = prefixes[name] = _Prefix(parent)
                above = prefixes.get(parent) if parent is not None else None
                if above is not None:
                    above.children += 1
            holders = prefix.holders
            holders.pop(pod_uid, None)
            holders[pod_uid] = computed
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
            parent = name
        # The shortest last, so that a prefix never leaves before its continuations.
        for name in reversed(hashes):
            prefixes.move_to_end(name)
        while len(prefixes) > self._max_prefixes:
            _, gone = prefixes.popitem(last=False)
            above = prefixes.get(gone.parent) if gone.parent is not None else None
            if above is not None:
                above.children -= 1
