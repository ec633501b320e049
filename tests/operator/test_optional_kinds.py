"""Kinds whose CRDs come and go while the operator runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from npufleet_operator.errors import ApiError
from npufleet_operator.handlers import AbsentIsFine
from npufleet_operator.shell.kinds import HTTP_ROUTE, POD
from npufleet_operator.shell.mirror import ALL_POOLS, Mirror
from npufleet_operator.shell.optional_kinds import OptionalKinds
from support.kube_server import KubeServer, kube_server

VERSION = "/apis/gateway.networking.k8s.io/v1"
ROUTE: dict[str, Any] = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "HTTPRoute",
    "metadata": {"name": "a", "namespace": "x", "uid": "u", "resourceVersion": "7"},
}


def discover(server: KubeServer, *plurals: str) -> None:
    """What the API server says it has in that group and version."""
    server.objects[VERSION] = {"kind": "APIResourceList", "resources": [{"name": plural} for plural in plurals]}


async def test_a_kind_that_comes_and_goes_has_every_pool_planned_again_and_its_objects_forgotten() -> None:
    async with kube_server() as (server, client):
        mirror = Mirror()
        woken: list[str] = []
        mirror.subscribe(woken.append)
        optional = OptionalKinds(client, mirror, "")
        await optional.refresh()
        assert (optional.names, optional.present(), woken) == (frozenset(), (), [])
        assert [item.kind for item in optional.watched] == [HTTP_ROUTE], "its watch waits for it"
        discover(server, "gateways")
        await optional.refresh()
        assert (optional.names, woken) == (frozenset(), [])
        discover(server, "gateways", "httproutes")
        await optional.refresh()
        assert (optional.names, woken) == (frozenset({"HTTPRoute"}), [ALL_POOLS])
        assert [item.kind for item in optional.present()] == [HTTP_ROUTE]
        mirror.upsert(HTTP_ROUTE, ROUTE)
        await optional.refresh()
        assert len(mirror.known(HTTP_ROUTE)) == 1
        del server.objects[VERSION]
        await optional.refresh()
        assert (optional.names, mirror.known(HTTP_ROUTE), woken[-1]) == (frozenset(), [], ALL_POOLS)


async def test_a_group_that_is_unknown_is_no_kind_and_an_outage_changes_nothing() -> None:
    async with kube_server() as (server, client):
        optional = OptionalKinds(client, Mirror(), "")
        discover(server, "httproutes")
        await optional.refresh()
        server.fail[("GET", VERSION)] = 503
        with pytest.raises(ApiError):
            await optional.refresh()
        assert optional.names == {"HTTPRoute"}
        server.fail[("GET", VERSION)] = 404
        await optional.refresh()
        assert optional.names == frozenset()
        assert not await client.serves(POD)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "Unresolved resources cannot be served (try creating their CRDs): Selector(group='g', version='v1', any_name='httproutes')",
            False,
        ),
        ("Unresolved resources cannot be served: Selector(any_name='httproutes'), Selector(any_name='npupools')", True),
        ("Unresolved resources cannot be served: something new", True),
        ("Not enough permissions to watch for resources: any_name='httproutes'", True),
    ],
)
def test_a_kind_that_may_be_absent_is_no_warning(message: str, told: bool) -> None:
    record = logging.LogRecord("kopf", logging.WARNING, "", 0, message, None, None)
    assert AbsentIsFine().filter(record) is told
