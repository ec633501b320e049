"""The gateway's objects: its own door, a route to it, or a site's inference gateway instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npufleet_api.conditions import Reason
from npufleet_api.pool import GatewayTemplate
from npufleet_operator.core.actions import Plan, object_id
from support.fleet import CONFIG, Fleet, model_spec, pool_spec

WITH_ROUTES = replace(CONFIG, optional_kinds=frozenset({"HTTPRoute"}))
ROUTE: dict[str, Any] = {"parentRefs": [{"name": "public", "namespace": "ingress", "sectionName": "https"}], "hostnames": ["llm.example"]}


def fleet(gateway: dict[str, Any], config: Any = WITH_ROUTES) -> Fleet:
    made = Fleet(config=config)
    made.pool = pool_spec().model_copy(update={"gateway": GatewayTemplate.model_validate(gateway)})
    made.add_model("tiny", model_spec())
    made.settle()
    return made


def condition(found: Fleet, kind: str) -> tuple[str, str, str]:
    held = found.pool_status.condition(kind)
    assert held is not None
    return held.status, held.reason, held.message


def manifest(plan: Plan, kind: str) -> dict[str, Any]:
    (found,) = [m for m in plan.objects if m["kind"] == kind and not m["metadata"].get("ownerReferences")]
    return dict(found)


def kinds(found: Fleet) -> set[str]:
    """Kinds of the gateway's own objects."""
    return {identity[0] for identity, owner in found.owners.items() if not owner}


def test_a_route_leads_the_public_paths_to_the_pools_gateway() -> None:
    plan = fleet({"httpRoute": ROUTE}).plan()
    route, service = manifest(plan, "HTTPRoute"), manifest(plan, "Service")
    assert object_id(route)[1:] == object_id(service)[1:]
    assert route["spec"] == {
        "parentRefs": [{"name": "public", "namespace": "ingress", "sectionName": "https"}],
        "hostnames": ["llm.example"],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                "backendRefs": [{"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}],
            }
        ],
    }


def test_without_the_gateway_apis_crds_there_is_no_route_and_the_condition_says_so() -> None:
    found = fleet({"httpRoute": ROUTE}, CONFIG)
    assert kinds(found) == {"Service", "Deployment"}
    status, reason, message = condition(found, "GatewayAvailable")
    assert (status, reason) == ("True", Reason.ROUTE_KIND_MISSING)
    assert "spec.gateway.httpRoute" in message


def test_no_route_is_made_unasked_and_one_that_is_no_longer_asked_for_goes() -> None:
    assert kinds(fleet({})) == {"Service", "Deployment"}
    found = fleet({"httpRoute": ROUTE})
    assert kinds(found) == {"Service", "Deployment", "HTTPRoute"}
    found.pool = pool_spec()
    found.settle()
    assert kinds(found) == {"Service", "Deployment"}


def test_with_an_external_gateway_there_is_none_of_ours_and_models_go_on() -> None:
    found = fleet({})
    assert found.pool is not None
    found.pool = found.pool.model_copy(update={"gateway": GatewayTemplate.model_validate({"mode": "External", "httpRoute": ROUTE})})
    found.settle()
    assert kinds(found) == set()
    assert condition(found, "GatewayAvailable")[:2] == ("True", Reason.GATEWAY_EXTERNAL)
    assert condition(found, "Ready")[0] == "True"
    assert found.pool_status.endpoint == ""
    assert found.models["team", "tiny"].status.ready_replicas == 1


def test_an_inference_gateways_namespaces_may_reach_the_engines_and_nothing_else() -> None:
    policy = next(m for m in fleet({"inferenceGatewayNamespaces": ["istio", "epp"]}).plan().objects if m["kind"] == "NetworkPolicy")
    plain = next(m for m in fleet({}).plan().objects if m["kind"] == "NetworkPolicy")
    engine, admin, monitor = policy["spec"]["ingress"]
    named = [p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for p in engine["from"] if "namespaceSelector" in p]
    assert named[1:] == ["epp", "istio"]
    assert [admin, monitor] == plain["spec"]["ingress"][1:]
    assert len(plain["spec"]["ingress"][0]["from"]) == 2


def arguments(plan: Plan) -> list[str]:
    """How the gateway is started."""
    return list(manifest(plan, "Deployment")["spec"]["template"]["spec"]["containers"][0]["command"])


@pytest.mark.parametrize(
    ("gateway", "ports", "endpoint", "only"),
    [
        ({}, ["http"], "http://{}:8080/v1", False),
        ({"tlsSecretName": "cert"}, ["http", "https"], "http://{}:8080/v1", False),
        ({"tlsSecretName": "cert", "tlsOnly": True}, ["https"], "https://{}:8443/v1", True),
    ],
)
def test_clients_get_the_ports_that_the_pool_wants_and_probes_keep_theirs(
    gateway: dict[str, Any], ports: list[str], endpoint: str, only: bool
) -> None:
    found = fleet({**gateway, "httpRoute": ROUTE})
    plan = found.plan()
    service = manifest(plan, "Service")
    assert [port["name"] for port in service["spec"]["ports"]] == ports
    assert found.pool_status.endpoint == endpoint.format(f"{service['metadata']['name']}.{CONFIG.namespace}.svc")
    assert ("--tls-only" in arguments(plan)) is only
    (container,) = manifest(plan, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {8080}
    backend = manifest(plan, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]["port"]
    assert backend == (8443 if only else 8080)


def test_hedging_is_off_unless_the_pool_asks_for_it() -> None:
    assert not any("hedge" in argument for argument in arguments(fleet({}).plan()))
    given = arguments(fleet({"hedging": {"budgetPercent": 3}}).plan())
    at = given.index("--hedge-budget-percent")
    assert given[at : at + 4] == ["--hedge-budget-percent", "3", "--hedge-delay-percentile", "95"]
