"""A pool's HTTPRoute: what a Gateway of the Gateway API needs to lead clients to the pool's gateway."""

from __future__ import annotations

from npufleet_api.contract import GATEWAY_PORT, GATEWAY_TLS_PORT
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.naming import gateway_child
from npufleet_operator.core.objects.common import Manifest, without_none
from npufleet_operator.core.objects.gateway import gateway_metadata, tls_only
from npufleet_operator.core.observed import OperatorConfig

HTTP_ROUTE_KIND = "HTTPRoute"
PUBLIC_PREFIX = "/v1"
"""Reports, metrics and probes of the gateway stay inside the cluster."""


def build_http_route(pool: str, spec: InferencePoolSpec, config: OperatorConfig) -> Manifest | None:
    """The route; None where none is asked for, or the cluster has no such kind."""
    route = spec.gateway.http_route
    if route is None or HTTP_ROUTE_KIND not in config.optional_kinds:
        return None
    parents = [without_none({"name": p.name, "namespace": p.namespace, "sectionName": p.section_name}) for p in route.parent_refs]
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": PUBLIC_PREFIX}}],
        "backendRefs": [{"name": gateway_child(pool), "port": GATEWAY_TLS_PORT if tls_only(spec) else GATEWAY_PORT}],
    }
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": HTTP_ROUTE_KIND,
        "metadata": gateway_metadata(pool, config),
        "spec": without_none({"parentRefs": parents, "hostnames": list(route.hostnames) or None, "rules": [rule]}),
    }
