"""A model's NetworkPolicy: who may reach which port of its pods."""

from __future__ import annotations

from collections.abc import Sequence

from npufleet_api.contract import ADMIN_PORT, ENGINE_PORT, MONITOR_PORT
from npufleet_operator.core.naming import model_child
from npufleet_operator.core.objects.common import Manifest, model_metadata, model_selector
from npufleet_operator.core.observed import ModelView

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"


def build_network_policy(model: ModelView, operator_namespace: str, gateway_namespaces: Sequence[str] = ()) -> Manifest:
    """Engine: operator's namespace (gateway), the model's own, and `gateway_namespaces`, those of a site's inference gateway; admin:
    operator's namespace; monitor: everyone that scrapes.
    """
    operator = _namespace(operator_namespace)
    clients = [operator, {"podSelector": {}}, *(_namespace(name) for name in sorted(set(gateway_namespaces) - {operator_namespace}))]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": model_metadata(model, model_child(model.name)),
        "spec": {
            "podSelector": {"matchLabels": model_selector(model)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": clients, "ports": [{"protocol": "TCP", "port": ENGINE_PORT}]},
                {"from": [operator], "ports": [{"protocol": "TCP", "port": ADMIN_PORT}]},
                {"ports": [{"protocol": "TCP", "port": MONITOR_PORT}]},
            ],
        },
    }


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: name}}}
