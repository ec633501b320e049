"""Objects that every cluster gets after its API server is up (pure)."""

from __future__ import annotations

from typing import Any

import yaml

from devcluster.npu.exporter import PORT
from devcluster.settings import ClusterSettings


def _role_binding(name: str, role: str, user: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    }


def _node_service(settings: ClusterSettings, namespace: str, name: str, ports: list[dict[str, Any]], **spec: Any) -> list[dict[str, Any]]:
    """A Service without a selector whose one endpoint is a process of the node."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "labels": {"k8s-app": name}},
            "spec": {"ports": ports, **spec},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-node",
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [str(settings.network.node)], "conditions": {"ready": True}}],
            "ports": [{"name": p["name"], "port": p["port"], "protocol": p["protocol"]} for p in ports],
        },
    ]


def manifests(settings: ClusterSettings) -> str:
    """YAML documents for `kubectl apply`: the DNS Service, the exporter's Service, rights of the node's processes."""
    dns_ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    exporter_ports = [{"name": "http", "port": PORT, "protocol": "TCP"}]
    objects: list[dict[str, Any]] = [
        _role_binding("devcluster:apiserver-kubelet", "system:kubelet-api-admin", "devcluster:apiserver"),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
            ],
        },
        _role_binding("system:coredns", "system:coredns", "system:coredns"),
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "devcluster:kwok"},
            "rules": [
                {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
                {
                    "apiGroups": [""],
                    "resources": ["pods"],
                    "verbs": ["delete", "get", "list", "patch", "update", "watch"],
                },
                {"apiGroups": [""], "resources": ["nodes/status", "pods/status"], "verbs": ["patch", "update"]},
                {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch", "update"]},
                {
                    "apiGroups": ["coordination.k8s.io"],
                    "resources": ["leases"],
                    "verbs": ["create", "get", "list", "patch", "update", "watch"],
                },
            ],
        },
        _role_binding("devcluster:kwok", "devcluster:kwok", "devcluster:kwok"),
        *_node_service(settings, "kube-system", "kube-dns", dns_ports, clusterIP=str(settings.network.dns_service)),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "npu-exporter"}},
        *_node_service(settings, "npu-exporter", "npu-exporter", exporter_ports),
    ]
    return yaml.safe_dump_all(objects)
