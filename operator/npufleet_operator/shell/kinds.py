"""Kinds that the operator watches or writes, and where the API server keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from npufleet_api import GROUP, MODEL_KIND, MODEL_PLURAL, POOL_KIND, POOL_PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    kind: str
    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of the collection, or of one object."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        tail = "".join(f"/{part}" for part in (name, subresource) if part)
        return f"{root}{scope}/{self.plural}{tail}"


POOL = Kind(POOL_KIND, GROUP, VERSION, POOL_PLURAL, namespaced=False)
MODEL = Kind(MODEL_KIND, GROUP, VERSION, MODEL_PLURAL)
POD = Kind("Pod", "", "v1", "pods")
NODE = Kind("Node", "", "v1", "nodes", namespaced=False)
NAMESPACE = Kind("Namespace", "", "v1", "namespaces", namespaced=False)
EVENT = Kind("Event", "", "v1", "events")
CHILDREN = (
    Kind("ConfigMap", "", "v1", "configmaps"),
    Kind("Service", "", "v1", "services"),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Kind("Job", "batch", "v1", "jobs"),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
)
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
"""Gateways; watched and written in the operator's own namespace only."""
HTTP_ROUTE = Kind("HTTPRoute", "gateway.networking.k8s.io", "v1", "httproutes")
OPTIONAL = (HTTP_ROUTE,)
"""Kinds of which the cluster may have none; watched, and written in the operator's own namespace, as long as it has their CRD."""

BY_NAME = {kind.kind: kind for kind in (POOL, MODEL, POD, NODE, NAMESPACE, EVENT, DEPLOYMENT, *CHILDREN, *OPTIONAL)}


def kind_of(manifest: Any) -> Kind:
    """The kind of a manifest. Raises KeyError for one that the operator does not handle."""
    return BY_NAME[manifest["kind"]]
