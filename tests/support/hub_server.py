"""A hub on loopback: the Hugging Face hub's and ModelScope's APIs over the same repository, with faults on request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

LFS_BYTES = 4096
"""Larger files are behind a redirect to another host, as hubs keep them."""
SIGNATURE = "signature-of-a-redirect"


@dataclass
class Fault:
    """What goes wrong with one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    break_after: int | None = None
    """The connection is reset after so many bytes."""
    corrupt: bool = False
    short_by: int = 0
    """The answer says, and has, fewer bytes than were asked for."""
    ignore_range: bool = False
    hold: asyncio.Event | None = None
    """The answer stops in its middle until this is set."""
    chunk_delay_seconds: float = 0


@dataclass
class Hub:
    """One repository `org/tiny` with commits. `faults` are used up one a request to the path; those in `always` stay."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    token: str = ""
    gated: bool = False
    wrong_sha256: set[str] = field(default_factory=set)
    wrong_size: dict[str, int] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    """Requests to the other host that carried credentials."""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an answer is held in its middle."""
    url: str = ""
    cdn: str = ""

    def commit_files(self, commit: str, files: dict[str, bytes]) -> None:
        """A further commit, which becomes the head; the earlier ones stay."""
        self.commits[self.commit] = self.files
        self.commit, self.files = commit, files

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or commit."""
        if revision in ("main", "master", self.commit):
            return self.commit, self.files
        return (revision, self.commits[revision]) if revision in self.commits else None

    def fault(self, path: str) -> Fault | None:
        """What shall go wrong now."""
        if waiting := self.faults.get(path):
            return waiting.pop(0)
        return self.always.get(path)


@asynccontextmanager
async def serve_hub(hub: Hub, host: str = "127.0.0.1") -> AsyncIterator[Hub]:
    """Serve the hub, and the other host that its redirects lead to."""
    async with listen(_cdn_app(hub), host) as cdn, listen(_hub_app(hub), host) as url:
        # Another name of loopback is another origin.
        hub.url, hub.cdn = url, cdn.replace("127.0.0.1", "localhost")
        yield hub


@asynccontextmanager
async def listen(app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve an application on a free port of `host`; its base URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _hub_app(hub: Hub) -> web.Application:
    app = web.Application()

    def refused(request: web.Request) -> web.Response | None:
        hub.requests.append(f"hub {request.path_qs}")
        bearer = request.headers.get("Authorization", "")
        if hub.token and bearer != f"Bearer {hub.token}":
            headers = {"X-Error-Code": "GatedRepo" if hub.gated else "RepoNotFound"}
            return web.json_response({"error": "no access"}, status=401 if not bearer else 403, headers=headers)
        return None

    async def info(request: web.Request) -> web.StreamResponse:
        if denied := refused(request):
            return denied
        if fault := hub.fault("list"):
            return web.json_response({"error": "fault"}, status=fault.status, headers=fault.headers)
        if request.match_info["repo"] != "org/tiny":
            return web.json_response({"error": "Repository not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        found = hub.at(request.match_info.get("revision", "main"))
        if found is None:
            return web.json_response({"error": "Invalid rev id"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        return web.json_response({"id": "org/tiny", "sha": commit, "siblings": [_sibling(hub, *item) for item in files.items()]})

    async def resolve(request: web.Request) -> web.StreamResponse:
        if denied := refused(request):
            return denied
        found = hub.at(request.match_info["revision"])
        path = request.match_info["path"]
        if found is None or path not in found[1]:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        if len(found[1][path]) > LFS_BYTES:
            raise web.HTTPFound(f"{hub.cdn}/{found[0]}/{path}?X-Amz-Signature={SIGNATURE}")
        return await _send(hub, request, path, found[1][path])

    async def ms_files(request: web.Request) -> web.StreamResponse:
        if denied := refused(request):
            return denied
        if fault := hub.fault("list"):
            return web.json_response({"Code": fault.status, "Message": "fault"}, status=fault.status, headers=fault.headers)
        found = hub.at(request.query["Revision"])
        if request.match_info["repo"] != "org/tiny" or found is None:
            return web.json_response({"Code": 10010205001, "Message": "not found", "Success": False, "Data": None})
        entries = [
            {
                "Path": path,
                "Name": path,
                "Type": "blob",
                "Size": _size(hub, path, data),
                "Sha256": _sha256(hub, path, data),
                "Revision": found[0],
            }
            for path, data in found[1].items()
        ]
        return web.json_response({"Code": 200, "Success": True, "Data": {"Files": [{"Path": "sub", "Type": "tree"}, *entries]}})

    async def ms_file(request: web.Request) -> web.StreamResponse:
        if denied := refused(request):
            return denied
        found, path = hub.at(request.query["Revision"]), request.query["FilePath"]
        if found is None or path not in found[1]:
            return web.Response(status=404)
        if len(found[1][path]) > LFS_BYTES:
            raise web.HTTPFound(f"{hub.cdn}/{found[0]}/{path}?X-Amz-Signature={SIGNATURE}")
        return await _send(hub, request, path, found[1][path])

    app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/revision/{revision}", info)
    app.router.add_get("/api/models/{repo:[^/]+/[^/]+}", info)
    app.router.add_get("/org/tiny/resolve/{revision}/{path:.+}", resolve)
    app.router.add_get("/api/v1/models/{repo:[^/]+/[^/]+}/repo/files", ms_files)
    app.router.add_get("/api/v1/models/org/tiny/repo", ms_file)
    return app


def _cdn_app(hub: Hub) -> web.Application:
    async def content(request: web.Request) -> web.StreamResponse:
        hub.requests.append(f"cdn {request.path}")
        if "Authorization" in request.headers or "Cookie" in request.headers:
            hub.leaked.append(request.path)
        if request.query.get("X-Amz-Signature") != SIGNATURE:
            return web.Response(status=403)
        found = hub.at(request.match_info["revision"])
        assert found is not None
        path = request.match_info["path"]
        return await _send(hub, request, path, found[1][path])

    app = web.Application()
    app.router.add_get("/{revision}/{path:.+}", content)
    return app


def _size(hub: Hub, path: str, data: bytes) -> int:
    return hub.wrong_size.get(path, len(data))


def _sha256(hub: Hub, path: str, data: bytes) -> str:
    return hashlib.sha256(data + (b"!" if path in hub.wrong_sha256 else b"")).hexdigest()


def _sibling(hub: Hub, path: str, data: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    size = _size(hub, path, data)
    sibling: dict[str, object] = {"rfilename": path, "size": size, "blobId": blob}
    if len(data) > LFS_BYTES:
        sibling["lfs"] = {"sha256": _sha256(hub, path, data), "size": size, "pointerSize": 130}
    return sibling


async def _send(hub: Hub, request: web.Request, path: str, data: bytes) -> web.StreamResponse:
    fault = hub.fault(path)
    if fault is not None and fault.hold is not None:
        hub.held.set()
    return await send_bytes(fault, request, data, {})


async def send_bytes(found: Fault | None, request: web.Request, data: bytes, more: dict[str, str]) -> web.StreamResponse:
    """The range that was asked for, or what the fault makes of it."""
    fault = found or Fault()
    if fault.status:
        return web.Response(status=fault.status, headers=fault.headers)
    part = request.http_range
    whole = fault.ignore_range or "Range" not in request.headers
    body = data if whole else data[part.start : part.stop]
    if fault.corrupt:
        body = bytes([body[0] ^ 1]) + body[1:]
    body = body[: len(body) - fault.short_by]
    headers = {"Content-Length": str(len(body)), "Accept-Ranges": "bytes", **more}
    if not whole:
        start = part.start or 0
        headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
    answer = web.StreamResponse(status=200 if whole else 206, headers=headers)
    await answer.prepare(request)
    if fault.break_after is not None:
        await answer.write(body[: fault.break_after])
        if request.transport is not None:
            request.transport.abort()
        return answer
    if fault.hold is not None:
        await answer.write(body[: len(body) // 2])
        await fault.hold.wait()
        body = body[len(body) // 2 :]
    step = 65536
    for at in range(0, len(body), step):
        await answer.write(body[at : at + step])
        if fault.chunk_delay_seconds:
            await asyncio.sleep(fault.chunk_delay_seconds)
    return answer
