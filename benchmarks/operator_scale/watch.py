"""A watch over the models' pods: what the benchmark measures by, and what the pretend gateway reports for."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from npufleet_operator.core.observed import PodView
from npufleet_operator.shell.parse import pod_view

MAX_LINE = 8 * 1024 * 1024


class PodWatch:
    """Pods of one namespace by UID; `seen` holds when each was first seen (time.monotonic)."""

    def __init__(self, pods: dict[str, PodView]) -> None:
        self.pods = pods
        self.seen: dict[str, float] = {}
        self.changed = asyncio.Event()

    async def run(self, kubeconfig: Path, namespace: str) -> None:
        """Until cancelled; a watch that ends is opened again from where it was."""
        configuration = Configuration()
        await kube_config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        url = f"{configuration.host}/api/v1/namespaces/{namespace}/pods"
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=context)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE) as session:
            while True:
                async with session.get(url) as response:
                    listed = await response.json()
                self.pods.clear()
                for raw in listed["items"]:
                    self._take("ADDED", raw)
                query = {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"], "allowWatchBookmarks": "true"}
                async with session.get(url, params=query) as response:
                    while line := await response.content.readline():
                        event: dict[str, Any] = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        if event["type"] != "BOOKMARK":
                            self._take(event["type"], event["object"])

    def _take(self, kind: str, raw: dict[str, Any]) -> None:
        pod = pod_view(raw)
        if kind == "DELETED":
            self.pods.pop(pod.uid, None)
        else:
            self.seen.setdefault(pod.uid, time.monotonic())
            self.pods[pod.uid] = pod
        self.changed.set()
