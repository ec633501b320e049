"""Fake nodes, played by kwok on the real control plane, for tests of scale (pure)."""

from __future__ import annotations

import json
from typing import Any

from devcluster.components import node_labels
from devcluster.settings import ClusterSettings

FAKE_LABEL = "devcluster.local/fake"
FAKE_ANNOTATION = "kwok.x-k8s.io/node"
FAKE_TAINT = "kwok.x-k8s.io/node"


def fake_node(index: int, npus: int, settings: ClusterSettings, *, tainted: bool) -> dict[str, Any]:
    """The Node object `fake-<index>` with `npus` cards; `tainted` keeps pods away that do not tolerate fake nodes."""
    name = f"fake-{index}"
    amounts = {"cpu": "192", "memory": "1536Gi", "pods": "250", settings.npu.resource_name: str(npus)}
    spec: dict[str, Any] = {}
    if tainted:
        spec["taints"] = [{"key": FAKE_TAINT, "value": "fake", "effect": "NoSchedule"}]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {**node_labels(settings), FAKE_LABEL: "true", "kubernetes.io/hostname": name},
            "annotations": {FAKE_ANNOTATION: "fake", "node.alpha.kubernetes.io/ttl": "0"},
        },
        "spec": spec,
        "status": {"capacity": amounts, "allocatable": amounts, "phase": "Running"},
    }


def fake_nodes(first: int, count: int, npus: int, settings: ClusterSettings, *, tainted: bool) -> str:
    """A List of `count` fake nodes numbered from `first`, as JSON for `kubectl create`."""
    items = [fake_node(index, npus, settings, tainted=tainted) for index in range(first, first + count)]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def next_index(names: list[str]) -> int:
    """The first free number after those of the fake nodes in `names`."""
    numbers = [int(name[5:]) for name in names if name.startswith("fake-") and name[5:].isdigit()]
    return max(numbers, default=-1) + 1
