"""A team on the cluster: its namespace, its models and what its clients see."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from demo.install import NAMESPACE, apply, service_address, volume_manifests
from devcluster import Cluster
from devcluster.testing import Kubectl, wait_until
from npufleet_api import API_VERSION, MODEL_KIND, POOL_KIND
from npufleet_api.contract import METRICS_PATH, OPERATOR_PORT
from npufleet_operator.core.naming import gateway_child
from support.traffic import Traffic

Json = dict[str, Any]
READY_SECONDS = 120
NODE_LABEL = "e2e.npufleet.dev/pool"
"""Says whose the cluster's only node is: a node that two pools select would belong to the older one."""


def give_node_to(cluster: Cluster, pool: str) -> None:
    """The cluster's node is this pool's from now on; what runs there goes on."""
    cluster.run_kubectl("label", "node", cluster.node_name, f"{NODE_LABEL}={pool}", "--overwrite")


def pool_manifest(name: str, **spec: Any) -> Json:
    """A pool of the pretend NPUs, on the CPU, that moves fast."""
    base: Json = {
        "npus": {"resourceName": "huawei.com/Ascend910", "nodeSelector": {NODE_LABEL: name}},
        "classes": [
            {"name": "chat", "priority": 3, "minPercent": 20, "maxPercent": 100},
            {"name": "document", "priority": 2, "minPercent": 30, "maxPercent": 60},
        ],
        "rebalancing": {"intervalSeconds": 2, "drainSeconds": 20},
        "podTemplate": {"device": "CPU", "shmSizeMi": 16},
    }
    return {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": name}, "spec": {**base, **spec}}


@dataclass(frozen=True)
class Team:
    """One namespace with a volume of a tiny model, beside a pool."""

    kubectl: Kubectl
    pool: str

    @property
    def namespace(self) -> str:
        """The team's own namespace."""
        return self.kubectl.namespace

    @property
    def address(self) -> str:
        """host:port of the pool's gateway."""
        return service_address(self.kubectl.cluster, gateway_child(self.pool))

    def add_volume(self, name: str, folder: Path) -> None:
        """A host folder as a claim of the namespace."""
        apply(self.kubectl.cluster, volume_manifests(name, self.namespace, folder))

    def manifest(self, name: str, **spec: Any) -> Json:
        """An AscendModel of the tiny model."""
        base: Json = {
            "poolRef": {"name": self.pool},
            "workloadClass": "chat",
            "model": {"uri": "pvc://tiny", "servedName": f"{self.namespace}-{name}"},
            "resources": {"cpu": "20m", "memory": "2Gi"},
            "engine": {"maxNumSequences": 16},
        }
        return {
            "apiVersion": API_VERSION,
            "kind": MODEL_KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {**base, **spec},
        }

    def apply_model(self, name: str, **spec: Any) -> None:
        """kubectl apply, client-side, as people do."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.manifest(name, **spec)))

    def model(self, name: str) -> Json:
        """The AscendModel as it is."""
        return self.kubectl.get("ascendmodel", name)

    def condition(self, name: str, kind: str = "Ready") -> Json | None:
        """A condition of the present generation, or None."""
        model = self.model(name)
        for condition in (model.get("status") or {}).get("conditions") or []:
            if condition["type"] == kind and condition["observedGeneration"] == model["metadata"]["generation"]:
                return dict(condition)
        return None

    def wait_condition(self, name: str, kind: str, status: str, reason: str = "", seconds: float = READY_SECONDS) -> Json:
        """The condition once it has this status (and reason) for the present generation."""

        def reached() -> Json | None:
            condition = self.condition(name, kind)
            if condition and condition["status"] == status and reason in ("", condition["reason"]):
                return condition
            return None

        return self.kubectl.wait(f"{name}: {kind} to be {status} {reason}", reached, seconds)

    def wait_ready(self, name: str, seconds: float = READY_SECONDS) -> None:
        """Ready and rolled out."""
        self.wait_condition(name, "Ready", "True", seconds=seconds)
        self.wait_condition(name, "RolledOut", "True", seconds=seconds)

    def wait_routed(self, name: str) -> None:
        """The gateway answers for the model: its view follows the cluster's within moments."""
        self.kubectl.wait(f"the gateway to serve {name}", lambda: self.chat(name) or None, 30)

    def chat(self, name: str, max_tokens: int = 4) -> str | None:
        """A chat completion through the gateway by the OpenAI client; None where it is refused for now."""
        from openai import APIStatusError

        with OpenAI(base_url=f"http://{self.address}/v1", api_key="none", max_retries=0, timeout=30) as client:
            try:
                answer = client.chat.completions.create(
                    model=f"{self.namespace}/{name}",
                    messages=[{"role": "user", "content": "hello"}],
                    max_tokens=max_tokens,
                    extra_body={"ignore_eos": True},
                )
            except APIStatusError as error:
                if error.status_code in (404, 503):
                    return None
                raise
        return f"{answer.usage.completion_tokens if answer.usage else 0} tokens"

    def pods(self, name: str) -> list[Json]:
        """The model's pods, by name."""
        pods = [p for p in self.kubectl.list("pods") if p["metadata"]["annotations"].get("npufleet.dev/model-name") == name]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def ready_pods(self, name: str) -> list[Json]:
        """Pods whose engine takes work and that are not on their way out."""
        return [
            pod
            for pod in self.pods(name)
            if "deletionTimestamp" not in pod["metadata"]
            and any(c["name"] == "engine" and c["ready"] for c in pod["status"].get("containerStatuses", []))
        ]

    def traffic(self, name: str, clients: int = 4, max_tokens: int = 24) -> Traffic:
        """Streaming clients that ask the gateway again and again until the block ends."""
        return Traffic(self.address, f"{self.namespace}/{name}", clients, max_tokens)


def operator_pod(kubectl: Kubectl) -> Json | None:
    """The operator's running, ready pod."""
    listed = kubectl.cluster.run_kubectl("-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", "json")
    for pod in json.loads(listed)["items"]:
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        if ready and "deletionTimestamp" not in pod["metadata"]:
            return dict(pod)
    return None


def operator_metrics(kubectl: Kubectl) -> str:
    """The operator's /metrics page."""
    pod = settled("the operator", lambda: operator_pod(kubectl))
    answer = httpx.get(f"http://{pod['status']['podIP']}:{OPERATOR_PORT}{METRICS_PATH}", timeout=30)
    return answer.raise_for_status().text


def settled(what: str, check: Callable[[], Any], seconds: float = 60) -> Any:
    """wait_until, for what is not in one namespace."""
    return wait_until(what, check, seconds)
