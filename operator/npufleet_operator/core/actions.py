"""What a plan consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from npufleet_api.conditions import Reason
from npufleet_api.model import AscendModelStatus
from npufleet_api.pool import InferencePoolStatus
from npufleet_operator.core.observed import ModelKey, PodView

Manifest = Mapping[str, Any]
ObjectId = tuple[str, str, str]
"""Kind, namespace and name."""


def object_id(manifest: Manifest) -> ObjectId:
    """Kind, namespace and name of a manifest."""
    metadata = manifest["metadata"]
    return (manifest["kind"], metadata["namespace"], metadata["name"])


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision with its reason: for status, Event, metric and log alike."""

    model: ModelKey
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a replica."""

    model: ModelKey
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class DrainPod:
    """Mark a replica as draining, and ask its engine to drain until the deadline."""

    pod: PodView
    reason: Reason
    since: datetime
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class CancelDrain:
    """Take a drain back."""

    pod: PodView


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod, by UID. `grace_seconds` None leaves the pod's own grace period."""

    pod: PodView
    reason: Reason
    grace_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What shall be done for one pool, in this order: objects, pods, prune, status."""

    objects: tuple[Manifest, ...] = ()
    creates: tuple[CreatePod, ...] = ()
    drains: tuple[DrainPod, ...] = ()
    cancels: tuple[CancelDrain, ...] = ()
    deletes: tuple[DeletePod, ...] = ()
    choices: tuple[Choice, ...] = ()
    model_status: Mapping[ModelKey, AscendModelStatus] = field(default_factory=dict)
    pool_status: InferencePoolStatus | None = None
    keep: frozenset[ObjectId] = frozenset()
    """Present objects that stay although the plan does not name them."""
    prune_owners: frozenset[str] = frozenset()
    """UIDs of models whose objects are deleted when they are neither named nor kept."""
    prune_gateway: bool = False
    """Whether the gateway's objects that the plan does not name are deleted: all of them once the pool is gone."""
    wake_after_seconds: float = 15.0
