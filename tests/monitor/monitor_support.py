"""An engine and an exporter on loopback, for the monitor's tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from npufleet_monitor.monitor import Monitor, Sources
from npufleet_monitor.settings import Identity, SettingsFile

IDENTITY = Identity("r0", "team-a", "pod-r0")
SETTINGS = {
    "pool": "prod",
    "modelNamespace": "team-a",
    "modelName": "chat",
    "servedName": "chat",
    "workloadClass": "chat",
    "scrapeIntervalSeconds": 0.2,
}


def write_settings(folder: Path, **changes: Any) -> Path:
    """A settings file."""
    path = folder / "monitor.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, **changes}), encoding="utf-8")
    return path


class EngineMetrics:
    """Real metrics under vLLM's names, as prometheus_client shows them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine"]

        def made(kind: Any, name: str, *extra: Any, **more: Any) -> Any:
            return kind(name, "x", labels, *extra, registry=self.registry, **more).labels("chat", "0")

        self.running = made(Gauge, "vllm:num_requests_running")
        self.waiting = made(Gauge, "vllm:num_requests_waiting")
        self.kv = made(Gauge, "vllm:kv_cache_usage_perc")
        self.prompt = made(Counter, "vllm:prompt_tokens")
        self.generation = made(Counter, "vllm:generation_tokens")
        buckets = (0.01, 0.1, 0.5, 1.0, 5.0)
        self.ttft = made(Histogram, "vllm:time_to_first_token_seconds", buckets=buckets)
        self.tpot = made(Histogram, "vllm:inter_token_latency_seconds", buckets=buckets)
        self.success = Counter("vllm:request_success", "x", [*labels, "finished_reason"], registry=self.registry)
        self.load = Gauge("npufleet:load_seconds", "x", registry=self.registry)
        self.most = Gauge("npufleet:max_num_sequences", "x", registry=self.registry)

    def finish(self, reason: str, count: int = 1) -> None:
        """Requests that ended."""
        self.success.labels("chat", "0", reason).inc(count)

    def page(self) -> bytes:
        """The metrics page."""
        return generate_latest(self.registry)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Listener:
    """A server on loopback that comes and goes."""

    def __init__(self) -> None:
        self.port = 0
        self._runner: web.AppRunner | None = None

    def routes(self) -> list[web.RouteDef]:
        """What it serves."""
        raise NotImplementedError

    async def start(self) -> None:
        """Listen; on the same port again after a stop."""
        app = web.Application()
        app.router.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        self.port = self.port or free_port()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Go away."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def url(self, path: str = "") -> str:
        """Address of a page."""
        return f"http://127.0.0.1:{self.port}{path}"


class Pages(Listener):
    """Serves pages by path; a page that is None is a 500."""

    def __init__(self, pages: dict[str, Callable[[], bytes] | None]) -> None:
        super().__init__()
        self.pages = pages

    def routes(self) -> list[web.RouteDef]:
        """All paths."""
        return [web.get("/{path:.*}", self._get)]

    async def _get(self, request: web.Request) -> web.Response:
        page = self.pages.get(request.path)
        return web.Response(status=500) if page is None else web.Response(body=page())


def build_monitor(folder: Path, pages: Pages, clock: Callable[[], float], **settings: Any) -> Monitor:
    """A monitor that reads `pages`; its wall clock is its clock."""
    sources = Sources(
        metrics_url=pages.url("/metrics"),
        state_url=pages.url("/state"),
        npu_exporter_url=pages.url("/npu") if "/npu" in pages.pages else None,
    )
    return Monitor(IDENTITY, SettingsFile(write_settings(folder, **settings)), sources, clock, clock)


def free_port() -> int:
    """A TCP port that nothing uses on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; the test's own timeout ends a hopeless wait."""
    while not condition():  # noqa: ASYNC110  # conditions of loops that know nothing of this test
        await asyncio.sleep(0.005)
