"""The Gateway API on a real API server: a route made, repaired and taken away, and a pool that leaves its models to another gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.install import NAMESPACE, apply
from devcluster import Cluster
from devcluster.testing import Kubectl
from npufleet_api.contract import GATEWAY_PORT
from npufleet_operator.core.naming import gateway_child
from support.team import Team, operator_pod, pool_manifest, settled

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "httproutes.gateway.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api/pull/2997"},
    },
    "spec": {
        "group": "gateway.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "HTTPRoute", "plural": "httproutes", "singular": "httproute"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
"""What the operator needs of the Gateway API's own CRD: group, version and kind."""
PARENT = {"name": "public", "namespace": "ingress"}


@pytest.fixture
def gateway_api(installed: Cluster, own_pool: Callable[..., Team]) -> Iterator[Callable[..., Team]]:
    """The kind HTTPRoute, and an operator that was started with it."""
    apply(installed, [CRD])
    installed.run_kubectl("wait", "--for=condition=Established", "crd", CRD["metadata"]["name"], "--timeout=30s")  # type: ignore[index]  # a string
    _restart_operator(installed)
    yield own_pool
    installed.run_kubectl("delete", "crd", CRD["metadata"]["name"])  # type: ignore[index]  # a string
    _restart_operator(installed)


def _restart_operator(cluster: Cluster) -> None:
    def pod() -> str | None:
        found = operator_pod(Kubectl(cluster, NAMESPACE))
        return found["metadata"]["name"] if found else None

    before = settled("the operator", pod)
    cluster.run_kubectl("-n", NAMESPACE, "delete", "pod", before, "--wait=false")
    settled("another operator", lambda: (now := pod()) and now != before, 120)


def _named(team: Team, kind: str) -> dict[str, Any] | None:
    """The gateway's object of a kind."""
    cluster = team.kubectl.cluster
    found = cluster.run_kubectl("-n", NAMESPACE, "get", kind, gateway_child(team.pool), "--ignore-not-found", "-o", "json")
    return dict(json.loads(found)) if found.strip() else None


def _gateway_reason(team: Team) -> str:
    status = json.loads(team.kubectl.cluster.run_kubectl("get", "npool", team.pool, "-o", "json")).get("status") or {}
    return next((str(c["reason"]) for c in status.get("conditions", []) if c["type"] == "GatewayAvailable"), "")


def _set_gateway(team: Team, **gateway: Any) -> None:
    apply(team.kubectl.cluster, [pool_manifest(team.pool, gateway=gateway)])


def test_a_route_is_made_repaired_and_taken_away_and_the_site_may_bring_its_own_gateway(gateway_api: Callable[..., Team]) -> None:
    team = gateway_api(gateway={"httpRoute": {"parentRefs": [PARENT]}})
    cluster = team.kubectl.cluster
    route = settled("the route", lambda: _named(team, "httproute"))
    assert route["spec"]["parentRefs"] == [PARENT]
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": gateway_child(team.pool), "port": GATEWAY_PORT}]
    cluster.run_kubectl("-n", NAMESPACE, "delete", "httproute", gateway_child(team.pool))
    settled("the route again", lambda: _named(team, "httproute"))
    _set_gateway(team)
    settled("no route", lambda: _named(team, "httproute") is None)
    _set_gateway(team, mode="External")
    settled("no gateway of ours", lambda: _named(team, "deployment") is None and _named(team, "service") is None)
    settled("the condition", lambda: _gateway_reason(team) == "GatewayExternal")
    _set_gateway(team)
    settled("our gateway again", lambda: _gateway_reason(team) == "GatewayReady")


def test_without_the_gateway_api_a_route_is_not_made_and_the_pool_says_so(own_pool: Callable[..., Team]) -> None:
    team = own_pool(gateway={"httpRoute": {"parentRefs": [PARENT]}})
    settled("the condition", lambda: _gateway_reason(team) == "RouteKindMissing")
