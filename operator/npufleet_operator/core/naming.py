"""Names of children. Resource names may be DNS subdomains of 253 characters; Services and labels take labels of 63."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

SLUG_LENGTH = 40
REVISION_LENGTH = 8


@lru_cache(maxsize=8192)
def slug(name: str) -> str:
    """A DNS label of at most 40 characters that stands for `name`; with a short hash when anything was changed."""
    label = re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-")
    if label == name and len(label) <= SLUG_LENGTH and label[0].isalpha():
        return label
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    prefix = label if label[:1].isalpha() else f"m-{label}"
    return f"{prefix[: SLUG_LENGTH - 7].rstrip('-')}-{digest}"


def pod_name(model: str, revision: str, slot: int) -> str:
    """Name of the replica of `model` in `slot`."""
    return f"{slug(model)}-{revision}-{slot}"


def model_child(model: str) -> str:
    """Name of a model's Service, PodDisruptionBudget and NetworkPolicy; prefixed, so that it does not meet a team's own objects."""
    return f"npufleet-{slug(model)}"


def settings_child(model: str, revision: str) -> str:
    """Name of the ConfigMap with the engine's settings of one revision."""
    return f"npufleet-{slug(model)}-{revision}"


def monitor_child(model: str) -> str:
    """Name of the ConfigMap with the monitors' settings."""
    return f"npufleet-{slug(model)}-monitor"


def gateway_child(pool: str) -> str:
    """Name of a pool's gateway Deployment and Service."""
    return f"npufleet-gateway-{slug(pool)}"
