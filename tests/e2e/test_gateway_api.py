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

CRD_NAME = "httproutes.gateway.networking.k8s.io"
CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": CRD_NAME,
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
def gateway_api(installed: Cluster) -> Iterator[Callable[[], None]]:
    """Installs the kind HTTPRoute, while the operator runs; it is gone again after the test."""

    def install() -> None:
        apply(installed, [CRD])
        installed.run_kubectl("wait", "--for=condition=Established", "crd", CRD_NAME, "--timeout=30s")

    yield install
    installed.run_kubectl("delete", "crd", CRD_NAME, "--ignore-not-found")


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


def _operator(team: Team) -> tuple[str, int]:
    """The operator's pod, and how often its container was restarted."""
    pod = settled("the operator", lambda: operator_pod(Kubectl(team.kubectl.cluster, NAMESPACE)))
    return pod["metadata"]["name"], sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


@pytest.mark.timeout(600)
def test_a_route_is_made_once_its_kind_is_there_repaired_and_taken_away(
    own_pool: Callable[..., Team], gateway_api: Callable[[], None]
) -> None:
    team = own_pool(gateway={"httpRoute": {"parentRefs": [PARENT]}})
    cluster, before = team.kubectl.cluster, _operator(team)
    settled("the condition", lambda: _gateway_reason(team) == "RouteKindMissing")
    for _ in range(2):
        gateway_api()
        route = settled("the route", lambda: _named(team, "httproute"), 60)
        assert route["spec"]["parentRefs"] == [PARENT]
        assert route["spec"]["rules"][0]["backendRefs"] == [{"name": gateway_child(team.pool), "port": GATEWAY_PORT}]
        settled("the condition", lambda: _gateway_reason(team) == "GatewayReady")
        cluster.run_kubectl("-n", NAMESPACE, "delete", "httproute", gateway_child(team.pool))
        settled("the route again", lambda: _named(team, "httproute"))
        cluster.run_kubectl("delete", "crd", CRD_NAME)
        settled("the kind's end to be noticed", lambda: _gateway_reason(team) == "RouteKindMissing", 60)
    gateway_api()
    settled("the route", lambda: _named(team, "httproute"), 60)
    _set_gateway(team)
    settled("no route", lambda: _named(team, "httproute") is None)
    assert _operator(team) == before, "no restart was needed"


def test_the_site_may_bring_its_own_gateway(own_pool: Callable[..., Team]) -> None:
    team = own_pool()
    settled("our gateway", lambda: _gateway_reason(team) == "GatewayReady")
    _set_gateway(team, mode="External")
    settled("no gateway of ours", lambda: _named(team, "deployment") is None and _named(team, "service") is None)
    settled("the condition", lambda: _gateway_reason(team) == "GatewayExternal")
    _set_gateway(team)
    settled("our gateway again", lambda: _gateway_reason(team) == "GatewayReady")
