"""Objects of the API server, engines on loopback addresses, and a running gateway, for the gateway's tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from npufleet_api.contract import DRAIN_STARTED_ANNOTATION, MANAGED_BY, MANAGED_BY_LABEL, MODEL_NAME_ANNOTATION, POOL_LABEL
from npufleet_gateway.gateway import Gateway
from npufleet_gateway.server import GatewayServer
from npufleet_gateway.settings import GatewaySettings

POOL = "prod"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def model_object(
    name: str = "chat",
    namespace: str = "team-a",
    *,
    uid: str | None = None,
    created: str = "2026-01-01T00:00:00Z",
    pool: str = POOL,
    served_name: str | None = None,
    slo: dict[str, int] | None = None,
) -> dict[str, Any]:
    """An AscendModel as the API server sends it."""
    spec: dict[str, Any] = {"poolRef": {"name": pool}, "workloadClass": "chat", "model": {"uri": "pvc://weights/chat"}}
    if served_name is not None:
        spec["model"]["servedName"] = served_name
    if slo is not None:
        spec["slo"] = slo
    metadata = {"name": name, "namespace": namespace, "uid": uid or f"uid-{namespace}-{name}", "creationTimestamp": created}
    return {"apiVersion": "npufleet.dev/v1alpha1", "kind": "AscendModel", "metadata": metadata, "spec": spec}


def pod_object(
    name: str,
    model: str = "chat",
    namespace: str = "team-a",
    *,
    ip: str | None = "127.0.0.2",
    ready: bool = True,
    owner: str | None = None,
    draining: bool = False,
    deleting: bool = False,
    uid: str | None = None,
) -> dict[str, Any]:
    """An inference pod as the API server sends it."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"pod-{name}",
        "labels": {MANAGED_BY_LABEL: MANAGED_BY, POOL_LABEL: POOL},
        "annotations": {MODEL_NAME_ANNOTATION: model},
        "ownerReferences": [{"kind": "AscendModel", "name": model, "uid": owner or f"uid-{namespace}-{model}"}],
    }
    if draining:
        metadata["annotations"][DRAIN_STARTED_ANNOTATION] = "2026-01-01T00:00:00Z"
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status: dict[str, Any] = {"phase": "Running", "containerStatuses": [{"name": "engine", "ready": ready}]}
    if ip is not None:
        status["podIP"] = ip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def chunk(content: str) -> bytes:
    """A chat chunk as vLLM streams it."""
    return (
        b"data: "
        + json.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": content}}]}).encode()
        + b"\n\n"
    )


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def stream(request: web.Request, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
    """Answer with an event stream."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    async for part in chunks:
        await response.write(part)
    return response


async def chat(request: web.Request) -> web.StreamResponse:
    """An engine that says hello."""
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"object": "chat.completion", "choices": [{"message": {"content": "hello"}}], "model": body["model"]})

    async def chunks() -> AsyncIterator[bytes]:
        for part in (ROLE, chunk("hel"), chunk("lo"), DONE):
            yield part

    return await stream(request, chunks())


class Engine:
    """An HTTP server in a pod's place. `handler` answers every request; `seen` keeps the requests' headers."""

    def __init__(self, ip: str, handler: Handler) -> None:
        self.ip = ip
        self.handler = handler
        self.seen: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.active = 0
        self._transports: set[asyncio.Transport] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listen."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.ip, port, reuse_address=True).start()

    async def stop(self) -> None:
        """Reset every connection and close, as the kernel does for a killed process."""
        for transport in self._transports:
            transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append({"path": request.path, **{name.lower(): value for name, value in request.headers.items()}})
        self.bodies.append(await request.read())
        self.active += 1
        if request.transport is not None:
            self._transports.add(request.transport)
        try:
            return await self.handler(request)
        finally:
            self.active -= 1


class RawEngine:
    """A TCP server that answers each request with the same bytes and closes, or waits for the next request."""

    def __init__(self, script: bytes, *, keep_alive: bool) -> None:
        self._script = script
        self._keep_alive = keep_alive
        self._server: asyncio.Server | None = None
        self.connections = 0

    async def start(self, ip: str, port: int) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, ip, port, reuse_address=True, limit=64 * 1024 * 1024)

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(sum(lengths))
                writer.write(self._script)
                await writer.drain()
                if not self._keep_alive:
                    return
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Loopback:
    """A gateway and its pool of engines on 127.0.0.0/8, where every engine has the same port."""

    def __init__(self, gateway: Gateway, server: GatewayServer, url: str, session: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.server = server
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.session = session
        self.models = [model_object()]
        self.pods: list[dict[str, Any]] = []
        self.engines: list[Engine | RawEngine] = []
        self.publish()

    def publish(self) -> None:
        """Show models and pods to the gateway, as a list would."""
        self.gateway.view.models.replace(self.models)
        self.gateway.view.pods.replace(self.pods)

    async def engine(self, handler: Handler = chat, *, model: str = "chat", listening: bool = True, **pod: Any) -> Engine:
        """Another replica."""
        number = len(self.engines)
        engine = Engine(f"127.0.0.{number + 2}", handler)
        if listening:
            await engine.start(self.gateway.settings.engine_port)
        self.engines.append(engine)
        self.pods.append(pod_object(f"r{number}", model, ip=engine.ip, **pod))
        self.publish()
        return engine

    async def raw_engine(self, script: bytes, *, keep_alive: bool = False) -> RawEngine:
        """Another replica, which does not speak HTTP but plays a script."""
        number = len(self.engines)
        engine = RawEngine(script, keep_alive=keep_alive)
        await engine.start(f"127.0.0.{number + 2}", self.gateway.settings.engine_port)
        self.engines.append(engine)
        self.pods.append(pod_object(f"r{number}", ip=f"127.0.0.{number + 2}"))
        self.publish()
        return engine

    def post(self, body: Any = None, path: str = "/v1/chat/completions", **more: Any) -> Any:
        """A request as an aiohttp context manager; by default a chat for the model `chat`."""
        return self.session.post(self.url + path, json={"model": "chat", "messages": []} if body is None else body, **more)

    def stream(self, model: str = "chat") -> Any:
        """A streamed chat."""
        return self.post({"model": model, "messages": [], "stream": True})

    def traffic(self, name: str = "chat") -> Any:
        """The model's part of the report."""
        return next(model for model in self.gateway.report().models if model.name == name)

    def metric(self, name: str, **labels: str) -> float | None:
        """A sample of the metrics page; None where it is absent."""
        families = text_string_to_metric_families(self.gateway.metrics.render().decode())
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return next((sample.value for sample in samples if labels.items() <= sample.labels.items()), None)

    async def settled(self) -> None:
        """Until no request is in flight at the gateway."""
        await eventually(lambda: self.gateway.live_requests == 0)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; the test's own timeout ends a hopeless wait."""
    while not condition():  # noqa: ASYNC110  # conditions of servers that know nothing of this test
        await asyncio.sleep(0.005)


def free_port() -> int:
    """A TCP port that nothing uses on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class QuietServer(GatewayServer):
    """A gateway's server that leaves the process's signals alone; tests call handle_exit."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


@contextlib.asynccontextmanager
async def loopback(**settings: Any) -> AsyncIterator[Loopback]:
    """A running gateway without an API server: tests publish models and pods themselves."""
    ports = {"engine_port": free_port(), "monitor_port": free_port()}
    chosen = {**ports, "leave_seconds": 0.0, "grace_seconds": 1.0, "hold_seconds": 0.0, "access_log": False, **settings}
    gateway = Gateway(GatewaySettings(pool=POOL, name="gateway-0", **chosen), kube=None)
    port = free_port()
    server = QuietServer(gateway, "127.0.0.1", port)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or serving.done())
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            pool = Loopback(gateway, server, f"http://127.0.0.1:{port}", session)
            try:
                yield pool
            finally:
                for engine in pool.engines:
                    await engine.stop()
    finally:
        server.should_exit = True
        await serving
