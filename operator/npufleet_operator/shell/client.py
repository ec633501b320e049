"""A narrow asynchronous client: list, get, create, server-side apply, merge patch and delete, with typed errors and bounded time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from npufleet_operator.errors import NotFoundError, UnavailableError, api_error
from npufleet_operator.shell.kinds import Kind
from npufleet_operator.shell.metrics import API_REQUESTS

Json = dict[str, Any]
REQUEST_SECONDS = 10.0
LIST_SECONDS = 60.0
PAGE = 500


class KubeClient:
    """One per process. Retries nothing: the loop observes again."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    @classmethod
    async def connect(cls) -> Self:
        """From the pod's service account, or from KUBECONFIG."""
        configuration = Configuration()
        try:
            kube_config.load_incluster_config(client_configuration=configuration)
        except kube_config.ConfigException:
            await kube_config.load_kube_config(client_configuration=configuration)
        configuration.connection_pool_maxsize = 32
        return cls(ApiClient(configuration))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._api.close()

    async def list(self, kind: Kind, namespace: str = "", label_selector: str = "") -> tuple[list[Json], int]:
        """All objects, and the resource version of the list. Raises ApiError."""
        items: list[Json] = []
        token = ""
        while True:
            query = {"limit": str(PAGE), "labelSelector": label_selector, "continue": token}
            page = await self._request("GET", kind.path(namespace), query=query, seconds=LIST_SECONDS)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            token = metadata.get("continue") or ""
            if not token:
                for item in items:
                    item.setdefault("kind", kind.kind)
                    item.setdefault("apiVersion", kind.api_version)
                return items, int(metadata.get("resourceVersion") or 0)

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server has the kind, by its discovery. Raises ApiError."""
        try:
            found = await self._request("GET", f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}")
        except NotFoundError:
            return False
        return any(resource.get("name") == kind.plural for resource in found.get("resources") or [])

    async def get(self, kind: Kind, namespace: str, name: str) -> Json:
        """One object. Raises ApiError."""
        return await self._request("GET", kind.path(namespace, name))

    async def create(self, kind: Kind, namespace: str, manifest: Mapping[str, Any], field_manager: str) -> Json:
        """Create by POST. Raises ConflictError when the name is taken."""
        return await self._request("POST", kind.path(namespace), {"fieldManager": field_manager}, manifest)

    async def apply(self, kind: Kind, manifest: Mapping[str, Any], field_manager: str, subresource: str = "") -> Json:
        """Server-side apply, forced: the fields of the manifest are ours. Raises ApiError."""
        metadata = manifest["metadata"]
        path = kind.path(metadata.get("namespace", ""), metadata["name"], subresource)
        query = {"fieldManager": field_manager, "force": "true"}
        return await self._request("PATCH", path, query, manifest, content_type="application/apply-patch+yaml")

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], field_manager: str) -> Json:
        """JSON merge patch; with metadata.uid in it, only the very object is patched. Raises ApiError."""
        query = {"fieldManager": field_manager}
        return await self._request("PATCH", kind.path(namespace, name), query, patch, content_type="application/merge-patch+json")

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_seconds: int | None = None) -> Json:
        """Delete the object with this UID; another one of the same name is left alone. Raises ApiError."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._request("DELETE", kind.path(namespace, name), {}, body)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Json:
        parameters = [(key, value) for key, value in (query or {}).items() if value]
        headers = {"Accept": "application/json", "Content-Type": content_type}
        serialized = await self._api.param_serialize(
            method=method, resource_path=path, query_params=parameters, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = await self._api.call_api(*serialized, _request_timeout=aiohttp.ClientTimeout(total=seconds))
            raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            API_REQUESTS.labels(method, "unreachable").inc()
            raise UnavailableError(f"{method} {path}: {type(error).__name__}: {error}", 0) from error
        API_REQUESTS.labels(method, str(response.status)).inc()
        if response.status >= 400:
            raise api_error(response.status, f"{method} {path}: {response.status} {_message(raw)}")
        answer = json.loads(raw)
        if not isinstance(answer, dict):
            raise UnavailableError(f"{method} {path}: answer is not an object", response.status)
        return answer


def _message(raw: bytes) -> str:
    try:
        answer = json.loads(raw)
    except ValueError:
        return raw[:200].decode("utf-8", "replace")
    return str(answer.get("message", answer))[:1000] if isinstance(answer, dict) else str(answer)[:200]
