"""A small stand-in for the API server over real HTTP: it stores objects, versions them, and can be told to misbehave.

For the failure handling of our own client and loops only; what Kubernetes itself does is tested on a real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from npufleet_operator.shell.client import KubeClient

Json = dict[str, Any]


class KubeServer:
    """Objects by URL path. `fail` answers the next requests whose method and path prefix match with a status."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.fail: dict[tuple[str, str], int] = {}
        self.version = 100

    def put(self, path: str, manifest: Json) -> Json:
        """Store an object with a new version."""
        self.version += 1
        metadata = {"uid": f"uid-{path}", **manifest.get("metadata", {}), "resourceVersion": str(self.version)}
        self.objects[path] = {**manifest, "metadata": metadata}
        return self.objects[path]

    def writes(self) -> list[tuple[str, str]]:
        """Method and path of everything but reads."""
        return [(method, path) for method, path, _ in self.requests if method != "GET"]

    async def handle(self, request: web.Request) -> web.Response:
        """Any request."""
        body: Any = await request.json() if request.can_read_body else {}
        self.requests.append((request.method, request.path, body))
        for (method, prefix), status in self.fail.items():
            if request.method == method and request.path.startswith(prefix):
                return self._status(status, "told to fail")
        if request.method == "GET":
            return self._get(request.path)
        if request.method == "POST":
            path = f"{request.path}/{body['metadata']['name']}"
            if path in self.objects:
                return self._status(409, "already exists")
            return web.json_response(self.put(path, body), status=201)
        if request.method == "PATCH":
            path = request.path.removesuffix("/status")
            merged = _merge(self.objects.get(path, {}), body)
            return web.json_response(self.put(path, merged))
        if request.path not in self.objects:
            return self._status(404, "not found")
        wanted = body.get("preconditions", {}).get("uid")
        if wanted and wanted != self.objects[request.path]["metadata"]["uid"]:
            return self._status(409, "uid in precondition does not match")
        return web.json_response(self.objects.pop(request.path))

    def _get(self, path: str) -> web.Response:
        if path in self.objects:
            return web.json_response(self.objects[path])
        items = [value for key, value in self.objects.items() if key.rpartition("/")[0].replace("/namespaces/team", "") == path]
        if not items and path.count("/") > 5:
            return self._status(404, "not found")
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    @staticmethod
    def _status(code: int, message: str) -> web.Response:
        return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


@asynccontextmanager
async def kube_server() -> AsyncIterator[tuple[KubeServer, KubeClient]]:
    """A running server and a client of it."""
    server = KubeServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with KubeClient(ApiClient(configuration)) as client:
            yield server, client
    finally:
        await runner.cleanup()


def _merge(base: Any, patch: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return patch
    merged = {**base, **{key: _merge(base.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in merged.items() if value is not None}
