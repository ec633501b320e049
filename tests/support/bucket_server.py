"""An object store on loopback that speaks the part of the S3 API that readers use, checks signatures, and fails on request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote
from xml.sax.saxutils import escape

from aiohttp import web

from support.hub_server import Fault, listen, send_bytes

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass
class Bucket:
    """Bucket `models`. Without `keys` everyone may read. `page` objects are listed at a time."""

    objects: dict[str, bytes]
    keys: tuple[str, str] | None = None
    page: int = 3
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    changed_after: dict[str, int] = field(default_factory=dict)
    """An object gets another entity tag after so many requests for it."""
    url: str = ""

    def fault(self, path: str) -> Fault | None:
        """What shall go wrong now."""
        if waiting := self.faults.get(path):
            return waiting.pop(0)
        return self.always.get(path)

    def tag(self, key: str) -> str:
        """Entity tag of an object."""
        seen = sum(line == f"GET {key}" for line in self.requests)
        changed = key in self.changed_after and seen > self.changed_after[key]
        return f'"{hashlib.md5(self.objects[key] + (b"!" if changed else b""), usedforsecurity=False).hexdigest()}"'


@asynccontextmanager
async def serve_bucket(bucket: Bucket) -> AsyncIterator[Bucket]:
    """Serve it."""

    async def listing(request: web.Request) -> web.StreamResponse:
        if denied := _denied(bucket, request):
            return denied
        if fault := bucket.fault("list"):
            return _error(fault.status, "Fault")
        prefix = request.query.get("prefix", "")
        keys = sorted(key for key in bucket.objects if key.startswith(prefix))
        first = int(request.query.get("continuation-token", "0"))
        page, more = keys[first : first + bucket.page], first + bucket.page < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{escape(bucket.tag(key))}</ETag>"
            f"<Size>{len(bucket.objects[key])}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{first + bucket.page}</NextContinuationToken>" if more else ""
        body = (
            f'<ListBucketResult xmlns="{NAMESPACE}"><Name>models</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>'
            f"<MaxKeys>{bucket.page}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{contents}{token}</ListBucketResult>"
        )
        return web.Response(text=body, content_type="application/xml")

    async def read(request: web.Request) -> web.StreamResponse:
        key = request.match_info["key"]
        bucket.requests.append(f"GET {key}")
        if denied := _denied(bucket, request):
            return denied
        if request.match_info["bucket"] != "models":
            return _error(404, "NoSuchBucket")
        if key not in bucket.objects:
            return _error(404, "NoSuchKey")
        tag = bucket.tag(key)
        if request.headers.get("If-Match", tag) != tag:
            return _error(412, "PreconditionFailed")
        headers = {"ETag": tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        return await send_bytes(bucket.fault(key), request, bucket.objects[key], headers)

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        return _denied(bucket, request) or _error(404, "NoSuchBucket")

    app = web.Application()
    app.router.add_get("/models", listing)
    app.router.add_get("/models/", listing)
    app.router.add_get("/{bucket}/{key:.+}", read)
    app.router.add_get("/{bucket}", elsewhere)
    async with listen(app) as url:
        bucket.url = url
        yield bucket


def _error(status: int, code: str) -> web.Response:
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return web.Response(status=status, text=body, content_type="application/xml")


def _denied(bucket: Bucket, request: web.Request) -> web.Response | None:
    if bucket.keys is None:
        return None
    given = request.headers.get("Authorization", "")
    if not given.startswith("AWS4-HMAC-SHA256 "):
        return _error(403, "AccessDenied")
    return None if hmac.compare_digest(given, _expected(bucket.keys, request, given)) else _error(403, "SignatureDoesNotMatch")


def _expected(keys: tuple[str, str], request: web.Request, given: str) -> str:
    """The Authorization header that the keys' owner sends: Signature Version 4, as AWS documents it."""
    parts = dict(item.split("=", 1) for item in given.removeprefix("AWS4-HMAC-SHA256 ").split(", "))
    scope = parts["Credential"].split("/", 1)[1]
    signed = parts["SignedHeaders"]
    query = "&".join(sorted(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in request.query.items()))
    headers = "".join(f"{name}:{request.headers[name].strip()}\n" for name in signed.split(";"))
    path = request.raw_path.partition("?")[0]
    canonical = "\n".join([request.method, path, query, headers, signed, request.headers["x-amz-content-sha256"]])
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys[1]}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return f"AWS4-HMAC-SHA256 Credential={keys[0]}/{scope}, SignedHeaders={signed}, Signature={signature}"
