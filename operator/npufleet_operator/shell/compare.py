"""Whether a live object already has everything that a manifest asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ATOMIC = frozenset({"selector", "podSelector", "nodeSelector", "ingress", "policyTypes"})
"""Fields that Kubernetes treats as one value with one owner (`x-kubernetes-map-type` or `list-type: atomic`): what someone adds inside
changes the whole, as one more label in a selector does."""


def satisfies(live: Any, wanted: Any) -> bool:
    """Whether `live` contains `wanted`: fields that the manifest does not name are someone else's, or defaults."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(key in live and _field(key, live[key], value) for key, value in wanted.items())
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if not isinstance(live, Sequence) or isinstance(live, str):
            return False
        return _contains(live, wanted)
    return bool(live == wanted)


def _field(key: str, live: Any, wanted: Any) -> bool:
    return bool(live == wanted) if key in ATOMIC else satisfies(live, wanted)


def _contains(live: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Lists of named things may have grown by others' entries; all other lists must have the same length."""
    if wanted and all(isinstance(item, Mapping) and "name" in item for item in wanted):
        by_name = {item.get("name"): item for item in live if isinstance(item, Mapping)}
        return all(item["name"] in by_name and satisfies(by_name[item["name"]], item) for item in wanted)
    return len(live) == len(wanted) and all(satisfies(have, want) for have, want in zip(live, wanted, strict=True))
