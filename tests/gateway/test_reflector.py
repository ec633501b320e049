"""The watch loop against a server that fails in every way: the view ends up equal to what the server holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.api_server import MODELS, PODS, ListWatchServer, list_watch_server
from gateway.support import POOL, eventually, model_object, pod_object
from npufleet_gateway.errors import ConfigurationError
from npufleet_gateway.kube import KubeClient, Resource, kubernetes_configuration
from npufleet_gateway.objects import pod_selector
from npufleet_gateway.reflector import Reflector, ReflectorSettings
from npufleet_gateway.view import ClusterView

QUICK = ReflectorSettings(server_seconds=30, inactivity_seconds=0.3, first_backoff_seconds=0.01, longest_backoff_seconds=0.05)


class Watching:
    def __init__(self, server: ListWatchServer, view: ClusterView, models: Reflector, pods: Reflector) -> None:
        self.server = server
        self.view = view
        self.models = models
        self.pods = pods

    def ready(self) -> list[str]:
        route = self.view.table.find("chat")
        return [replica.pod_name for replica in route.ready] if route else []


@contextlib.asynccontextmanager
async def watching(server: ListWatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    client = KubeClient(await kubernetes_configuration())
    view = ClusterView(POOL)
    models = Reflector(client, Resource("AscendModel", MODELS), view.models, time.monotonic, QUICK)
    pods = Reflector(client, Resource("Pod", PODS, pod_selector(POOL)), view.pods, time.monotonic, QUICK)
    tasks = [asyncio.create_task(models.run()), asyncio.create_task(pods.run())]
    try:
        yield Watching(server, view, models, pods)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


async def test_what_was_there_is_listed_and_what_comes_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server, watching(server, tmp_path, monkeypatch) as world:
        await server.put(MODELS, model_object())
        await server.put(PODS, pod_object("r0"))
        await eventually(lambda: world.ready() == ["r0"])
        await server.put(PODS, pod_object("r1", ready=False))
        await server.put(PODS, pod_object("r1"))
        await eventually(lambda: world.ready() == ["r0", "r1"])
        await server.delete(PODS, "team-a/r0")
        await eventually(lambda: world.ready() == ["r1"])
    selectors = {query["labelSelector"] for path, query in server.requests if path == PODS}
    assert selectors == {pod_selector(POOL)}


async def test_long_lists_come_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        server.page_size = 3
        await server.put(MODELS, model_object())
        for number in range(8):
            await server.put(PODS, pod_object(f"r{number}"))
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: len(world.ready()) == 8)


@pytest.mark.parametrize("fault", ["gone", "410", "error", "500", "429", "garbage", "not-an-event", "cut", "reset"])
async def test_after_any_fault_of_a_watch_the_view_catches_up(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        await server.put(MODELS, model_object())
        await server.put(PODS, pod_object("r0"))
        server.watch_faults.extend([fault] * 3)
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: not server.watch_faults)
            assert world.ready() == ["r0"]
            await server.put(PODS, pod_object("r1"))
            await eventually(lambda: world.ready() == ["r0", "r1"])
            stats = [world.models.stats, world.pods.stats]
            counted = "expired" if fault in ("gone", "410") else "errors"
            await eventually(lambda: sum(one.lists for one in stats) == 2 + 3)
            assert sum(getattr(one, counted) for one in stats) == 3


@pytest.mark.parametrize("fault", ["500", "403", "404", "410", "garbage", "not-a-list"])
async def test_a_list_that_fails_is_repeated(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        await server.put(MODELS, model_object())
        server.list_faults.extend([fault] * 4)
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: world.view.synced)
            assert world.view.table.find("chat") is not None
            assert world.models.last_error or world.pods.last_error


async def test_a_silent_watch_is_replaced_from_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        await server.put(MODELS, model_object())
        server.watch_faults.extend(["stall", "stall"])
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: len(server.watches(PODS)) == 1 and len(server.watches(MODELS)) == 1)
            await server.put(PODS, pod_object("r0"))
            assert world.ready() == []
            await eventually(lambda: world.ready() == ["r0"])
            assert world.pods.stats.timeouts >= 1
            assert server.lists(PODS) == 1


async def test_the_view_serves_on_while_the_server_is_away_and_tells_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        await server.put(MODELS, model_object())
        await server.put(PODS, pod_object("r0"))
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: world.ready() == ["r0"])
            await eventually(lambda: world.pods.age_seconds == 0)
            await server.stop()
            await eventually(lambda: (world.pods.age_seconds or 0) > 0 and world.pods.stats.errors > 2)
            assert world.ready() == ["r0"]
            await server.start()
            await server.put(PODS, pod_object("r1"))
            await eventually(lambda: world.ready() == ["r0", "r1"])
            await eventually(lambda: world.pods.age_seconds == 0)


async def test_an_event_larger_than_a_read_buffer_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        await server.put(MODELS, model_object())
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: world.pods.age_seconds == 0)
            big = pod_object("r0")
            big["metadata"]["annotations"]["note"] = "x" * 3_000_000
            await server.put(PODS, big)
            await eventually(lambda: world.ready() == ["r0"])
            assert world.pods.stats.errors == 0


async def test_a_server_that_ends_watches_at_once_is_not_asked_in_a_tight_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with list_watch_server() as server:
        server.watch_faults.extend(["cut"] * 1000)
        async with watching(server, tmp_path, monkeypatch) as world:
            await eventually(lambda: world.pods.stats.errors >= 6)
            assert world.pods._backoff_seconds() >= QUICK.longest_backoff_seconds / 2


async def test_without_access_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="set KUBECONFIG"):
        await kubernetes_configuration()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match="set KUBECONFIG"):
        await kubernetes_configuration()
    (tmp_path / "bad").write_text("{", encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "bad"))
    with pytest.raises(ConfigurationError, match="set KUBECONFIG"):
        await kubernetes_configuration()
