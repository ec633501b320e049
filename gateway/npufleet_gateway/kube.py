"""The API server: client configuration, lists in pages, and watches as bounded lines."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from pydantic_core import from_json

from npufleet_gateway.errors import ConfigurationError, WatchError, WatchExpiredError

PAGE_SIZE = 500
MAX_LIST_BYTES = 256 * 1024 * 1024
MAX_EVENT_BYTES = 8 * 1024 * 1024
"""etcd refuses objects above 1.5 MiB; JSON of one stays well below this."""
LIST_TIMEOUT_SECONDS = 60
CONNECT_TIMEOUT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind to list and watch, across namespaces."""

    kind: str
    path: str
    label_selector: str = ""


@dataclass(frozen=True, slots=True)
class ListResult:
    """All objects of a list, and the resourceVersion to watch from."""

    items: list[dict[str, Any]]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch."""

    type: str
    object: dict[str, Any] = field(default_factory=dict)

    @property
    def resource_version(self) -> str:
        """The object's resourceVersion; empty if it has none."""
        metadata = self.object.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        return version if isinstance(version, str) else ""


async def kubernetes_configuration() -> Configuration:
    """From KUBECONFIG where it is set, else the pod's own service account. Raises ConfigurationError."""
    configuration = Configuration()
    try:
        if path := os.environ.get("KUBECONFIG"):
            await load_kube_config(config_file=path, client_configuration=configuration)
        else:
            load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"no access to an API server: {error}; run in a pod with a service account, or set KUBECONFIG") from error
    return configuration


class KubeClient:
    """Lists and watches over the official client, which brings TLS and the renewal of tokens."""

    def __init__(self, configuration: Configuration) -> None:
        self._client = ApiClient(configuration)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def list(self, resource: Resource) -> ListResult:
        """All objects, in pages. Raises WatchError, WatchExpiredError, aiohttp.ClientError, TimeoutError."""
        items: list[dict[str, Any]] = []
        token = ""
        while True:
            query = {"limit": str(PAGE_SIZE)}
            if token:
                query["continue"] = token
            timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
            response = await self._get(resource, query, timeout)
            try:
                raw = await _read_bounded(response, MAX_LIST_BYTES)
            finally:
                response.close()
            page = _parse_object(raw)
            metadata = page.get("metadata")
            if not isinstance(page.get("items"), list) or not isinstance(metadata, dict):
                raise WatchError(f"the list of {resource.kind} has no items or no metadata")
            items.extend(item for item in page["items"] if isinstance(item, dict))
            token = metadata.get("continue") or ""
            if not token:
                return ListResult(items, str(metadata.get("resourceVersion") or ""))

    async def watch(
        self, resource: Resource, resource_version: str, *, server_seconds: int, inactivity_seconds: float
    ) -> AsyncGenerator[WatchEvent, None]:
        """Events after `resource_version`; a first event of type OPEN says that the watch stands.

        Ends when the server ends it. Raises WatchExpiredError (410), WatchError, aiohttp.ClientError, and TimeoutError after
        `inactivity_seconds` without a byte.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(server_seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_SECONDS, sock_read=inactivity_seconds)
        response = await self._get(resource, query, timeout)
        try:
            yield WatchEvent("OPEN")
            async for line in _lines(response.content, MAX_EVENT_BYTES):
                event = _parse_object(line)
                kind, body = event.get("type"), event.get("object")
                if not isinstance(kind, str) or not isinstance(body, dict):
                    raise WatchError("a watch event has no type or no object")
                if kind == "ERROR":
                    failure = WatchExpiredError if body.get("code") == 410 else WatchError
                    raise failure(f"{body.get('code')} {body.get('reason')}: {body.get('message')}")
                yield WatchEvent(kind, body)
        finally:
            response.close()

    async def _get(self, resource: Resource, query: dict[str, str], limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        if resource.label_selector:
            query["labelSelector"] = resource.label_selector
        try:
            method, url, headers, _, _ = await self._client.param_serialize(
                "GET", resource.path, header_params={"Accept": "application/json"}, auth_settings=["BearerToken"]
            )
        except ConfigException as error:
            raise WatchError(f"no token for the API server: {error}") from error
        answer = await self._client.call_api(method, f"{url}?{urlencode(query)}", headers, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        if response.status == 200:
            return response
        try:
            detail = (await _read_bounded(response, 64 * 1024)).decode("utf-8", "replace")[:512]
        finally:
            response.close()
        failure = WatchExpiredError if response.status == 410 else WatchError
        raise failure(f"HTTP {response.status} for {resource.path}: {detail}")


async def _read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > limit_bytes:
            raise WatchError(f"the answer has more than {limit_bytes} bytes")
        parts.append(chunk)
    return b"".join(parts)


async def _lines(stream: aiohttp.StreamReader, limit_bytes: int) -> AsyncIterator[bytes]:
    """Lines of any length up to the limit: StreamReader.readline fails beyond its read buffer."""
    buffer = bytearray()
    async for chunk in stream.iter_any():
        start = len(buffer)
        buffer += chunk
        while (end := buffer.find(b"\n", start)) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            start = 0
            if line.strip():
                yield line
        if len(buffer) > limit_bytes:
            raise WatchError(f"a watch event has more than {limit_bytes} bytes")
    if buffer.strip():
        raise WatchError("the watch ended in the middle of an event")


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = from_json(raw)
    except ValueError as error:
        raise WatchError(
            f"the API server sent what is not JSON: {error}; it starts with {json.dumps(raw[:80].decode('latin-1'))}"
        ) from error
    if not isinstance(parsed, dict):
        raise WatchError("the API server sent JSON that is not an object")
    return parsed
