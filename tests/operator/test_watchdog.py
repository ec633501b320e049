"""The watchdog: a silent watch is told from a quiet cluster and from an API server that is away."""

from __future__ import annotations

from typing import Any

import pytest

from npufleet_operator.errors import ApiError
from npufleet_operator.shell.kinds import NODE
from npufleet_operator.shell.mirror import Mirror
from npufleet_operator.shell.watchdog import SILENT_ROUNDS, Watchdog, Watched
from support.kube_server import kube_server

WATCHED = Watched(NODE)


def node(name: str, npus: int = 8) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"capacity": {"huawei.com/Ascend910": str(npus)}}}


async def test_priming_fills_the_mirror() -> None:
    async with kube_server() as (server, client):
        server.put("/api/v1/nodes/a", node("a"))
        mirror = Mirror()
        await Watchdog(client, mirror, (WATCHED,)).prime()
        assert set(mirror.nodes) == {"a"}


async def test_a_quiet_cluster_is_not_a_silent_watch() -> None:
    async with kube_server() as (server, client):
        server.put("/api/v1/nodes/a", node("a"))
        dog = Watchdog(client, Mirror(), (WATCHED,))
        await dog.prime()
        for _ in range(SILENT_ROUNDS):
            assert await dog.check(WATCHED, 0) == 0
        assert dog.silent() == []


async def test_what_the_watch_missed_is_healed_and_a_silent_watch_is_told() -> None:
    async with kube_server() as (server, client):
        mirror = Mirror()
        dog = Watchdog(client, mirror, (WATCHED,))
        await dog.prime()
        for round_number in range(SILENT_ROUNDS):
            assert dog.silent() == []
            server.put("/api/v1/nodes/a", node("a", round_number))
            assert await dog.check(WATCHED, 0) == 1
            assert mirror.nodes["a"].capacity == {"huawei.com/Ascend910": round_number}
        assert dog.silent() == ["Node"]
        assert await dog.check(WATCHED, 0) == 0
        assert dog.silent() == [], "it delivers again"


async def test_an_object_that_vanished_unseen_is_forgotten() -> None:
    async with kube_server() as (server, client):
        server.put("/api/v1/nodes/a", node("a"))
        server.put("/api/v1/nodes/b", node("b"))
        mirror = Mirror()
        dog = Watchdog(client, mirror, (WATCHED,))
        await dog.prime()
        del server.objects["/api/v1/nodes/a"]
        assert await dog.check(WATCHED, 0) == 1
        assert set(mirror.nodes) == {"b"}


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_an_outage_says_nothing_about_the_watch(status: int) -> None:
    async with kube_server() as (server, client):
        dog = Watchdog(client, Mirror(), (WATCHED,))
        await dog.prime()
        server.fail[("GET", "/")] = status
        for _ in range(SILENT_ROUNDS + 1):
            with pytest.raises(ApiError):
                await dog.check(WATCHED, 0)
        assert dog.silent() == []
