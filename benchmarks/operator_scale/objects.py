"""What is applied: one pool of fake nodes, its models, a volume for all, and the pod that stands for a gateway."""

from __future__ import annotations

from typing import Any

from npufleet_api import API_VERSION, MODEL_KIND, POOL_KIND
from npufleet_operator.core.objects.gateway import gateway_labels

Json = dict[str, Any]
POOL = "scale"
TEAM = "scale-team"
SYSTEM = "npufleet-system"
GATEWAY_POD = "pretend-gateway"
GATEWAY_ADDRESS = "127.0.0.9"
"""Where the pretend gateway listens on this machine; its pod's status says so."""
CLASSES = ("chat", "document", "code")
FAKE_LABEL = "devcluster.local/fake"
FAKE_TAINT = "kwok.x-k8s.io/node"
REPLICAS = 2
NPUS = 2


def pool(resource: str) -> Json:
    """Three classes, a quarter guaranteed to each, on the fake nodes only."""
    spec = {
        "npus": {"resourceName": resource, "nodeSelector": {FAKE_LABEL: "true"}},
        "classes": [{"name": name, "priority": 3 - index, "minPercent": 25, "maxPercent": 75} for index, name in enumerate(CLASSES)],
        "podTemplate": {
            "images": {"engine": "pretend/engine:1"},
            "tolerations": [{"key": FAKE_TAINT, "operator": "Exists", "effect": "NoSchedule"}],
        },
    }
    return {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": POOL}, "spec": spec}


def model_name(index: int) -> str:
    """Name of the model with this number."""
    return f"model-{index:04d}"


def model(index: int) -> Json:
    """An elastic model with an SLO, of the class whose turn it is."""
    spec = {
        "poolRef": {"name": POOL},
        "workloadClass": CLASSES[index % len(CLASSES)],
        "model": {"uri": "pvc://weights/model"},
        "parallelism": {"tensor": NPUS},
        "resources": {"cpu": "1", "memory": "1Gi"},
        "slo": {"ttftMilliseconds": 1000, "tpotMilliseconds": 60},
        "scaling": {"minReplicas": REPLICAS, "maxReplicas": 4 * REPLICAS},
    }
    return {"apiVersion": API_VERSION, "kind": MODEL_KIND, "metadata": {"name": model_name(index), "namespace": TEAM}, "spec": spec}


def volume() -> list[Json]:
    """A claim that every model reads from. Nothing reads it: pods of fake nodes do not run."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": TEAM},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": {"path": "/nonexistent"},
                "claimRef": {"namespace": TEAM, "name": "weights"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "weights", "namespace": TEAM},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": TEAM,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    ]


def gateway_pod(node: str) -> Json:
    """A pod that the operator takes for the pool's gateway, bound to a fake node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": GATEWAY_POD, "namespace": SYSTEM, "labels": gateway_labels(POOL)},
        "spec": {
            "nodeName": node,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "gateway", "image": "pretend/gateway:1"}],
        },
    }
