"""What demo and end-to-end tests share: the chart on a development cluster, and host folders as volumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devcluster import Cluster
from devcluster.run import run

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "npufleet-system"
RELEASE = "npufleet"
INSTALL_SECONDS = 180


def install_chart(cluster: Cluster, values: dict[str, Any] | None = None) -> None:
    """Install or upgrade the chart with the development image, and wait until the operator is ready. Raises CommandError."""
    repository, _, tag = cluster.dev_image.rpartition(":")
    image = {"repository": repository, "tag": tag}
    merged = {"image": {"controlPlane": image, "engine": image}, **(values or {})}
    command: list[str | Path] = [
        cluster.helm(),
        "upgrade",
        "--install",
        RELEASE,
        str(ROOT / "charts" / "npufleet"),
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        "--values",
        "-",
        "--wait",
        "--timeout",
        f"{INSTALL_SECONDS}s",
    ]
    run(command, stdin=json.dumps(merged), timeout_seconds=INSTALL_SECONDS + 60)


def volume_manifests(name: str, namespace: str, folder: Path, size: str = "1Gi") -> list[dict[str, Any]]:
    """A host folder as a PersistentVolume, and the claim that binds it."""
    volume = f"{namespace}-{name}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadOnlyMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": name},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadOnlyMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": {"storage": size}},
            },
        },
    ]


def apply(cluster: Cluster, manifests: list[dict[str, Any]]) -> None:
    """kubectl apply of several objects. Raises CommandError."""
    body = {"apiVersion": "v1", "kind": "List", "items": manifests}
    cluster.run_kubectl("apply", "-f", "-", stdin=json.dumps(body))


def service_address(cluster: Cluster, name: str, namespace: str = NAMESPACE, port: int = 8080) -> str:
    """host:port of a Service's cluster address, which this machine reaches directly."""
    address = cluster.run_kubectl("-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}").strip()
    return f"{address}:{port}"
