"""The list and watch of an API server, with faults on demand: what the watch loop's failure handling is tested against."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from gateway.support import free_port

MODELS = "/apis/npufleet.dev/v1alpha1/ascendmodels"
PODS = "/api/v1/pods"
POOLS = "/apis/npufleet.dev/v1alpha1/npupools"


class ListWatchServer:
    """Holds objects by path, in versions. Faults are taken one for each watch, in order."""

    def __init__(self) -> None:
        self.port = free_port()
        self.page_size = 500
        self.list_faults: deque[str] = deque()
        self.watch_faults: deque[str] = deque()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._objects: dict[str, dict[str, dict[str, Any]]] = {MODELS: {}, PODS: {}, POOLS: {}}
        self._log: list[tuple[int, str, str, dict[str, Any]]] = []
        self._version = 10
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen, on the same port each time."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        """Go away, watches included."""
        if self._runner is None:
            return
        server = self._runner.server
        for connection in server.connections if server is not None else []:
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._runner = None

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig that leads here."""
        path = folder / "kubeconfig"
        name = {"name": "test"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{**name, "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{**name, "user": {"token": "t"}}],
            "contexts": [{**name, "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    async def put(self, path: str, thing: dict[str, Any]) -> None:
        """Create or change an object."""
        key = f"{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}"
        await self._record(path, "MODIFIED" if key in self._objects[path] else "ADDED", key, thing)

    async def delete(self, path: str, key: str) -> None:
        """Delete an object."""
        await self._record(path, "DELETED", key, self._objects[path][key])

    def watches(self, path: str) -> list[dict[str, str]]:
        """Queries of the watches so far."""
        return [query for where, query in self.requests if where == path and query.get("watch") == "true"]

    def lists(self, path: str) -> int:
        """First pages of lists so far."""
        return sum(where == path and "watch" not in query and "continue" not in query for where, query in self.requests)

    async def _record(self, path: str, event: str, key: str, thing: dict[str, Any]) -> None:
        async with self._changed:
            self._version += 1
            stored = json.loads(json.dumps(thing))
            stored["metadata"]["resourceVersion"] = str(self._version)
            if event == "DELETED":
                del self._objects[path][key]
            else:
                self._objects[path][key] = stored
            self._log.append((self._version, path, event, stored))
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append((request.path, query))
        return await (self._watch(request, query) if query.get("watch") == "true" else self._list(request, query))

    async def _list(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        fault = self.list_faults.popleft() if self.list_faults else ""
        if fault.isdigit():
            return web.json_response({"kind": "Status", "message": "no"}, status=int(fault))
        if fault == "garbage":
            return web.Response(body=b"<html>\xff")
        if fault == "not-a-list":
            return web.json_response({"kind": "Status"})
        objects = list(self._objects[request.path].values())
        start = int(query.get("continue", "0"))
        end = start + self.page_size
        metadata = {"resourceVersion": str(self._version), "continue": str(end) if end < len(objects) else ""}
        return web.json_response({"kind": "List", "metadata": metadata, "items": objects[start:end]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        fault = self.watch_faults.popleft() if self.watch_faults else ""
        if fault.isdigit():
            return web.json_response({"kind": "Status", "message": "no", "reason": "Expired"}, status=int(fault))
        response = web.StreamResponse()
        await response.prepare(request)
        if fault == "gone":
            await response.write(_line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))
            return response
        if fault == "error":
            await response.write(_line("ERROR", {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}))
            return response
        if fault == "garbage":
            await response.write(b"{]\n")
        if fault == "not-an-event":
            await response.write(b'{"kind": "Status"}\n')
        if fault == "cut":
            await response.write(b'{"type": "ADDED", "object": {"meta')
        if fault in ("garbage", "not-an-event", "cut"):
            return response
        if fault == "reset":
            if request.transport is not None:
                request.transport.abort()
            return response
        if fault == "stall":
            await asyncio.Event().wait()
        await self._follow(request.path, int(query["resourceVersion"]), response)
        return response

    async def _follow(self, path: str, seen: int, response: web.StreamResponse) -> None:
        async with self._changed:
            while True:
                for version, where, event, thing in self._log:
                    if version > seen and where == path:
                        await response.write(_line(event, thing))
                seen = self._version
                await response.write(_line("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}}))
                await self._changed.wait()


def _line(event: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": thing}).encode() + b"\n"


@contextlib.asynccontextmanager
async def list_watch_server() -> Any:
    """A running server."""
    server = ListWatchServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
