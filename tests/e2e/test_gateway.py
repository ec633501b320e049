"""The gateway on the cluster: keys and classes, fairness under saturation, and restarts that no client notices."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import httpx
import pytest

from demo.install import NAMESPACE, apply
from devcluster import Cluster
from npufleet_api.contract import COMPONENT_LABEL, GATEWAY_PORT, GATEWAY_TLS_PORT, POOL_LABEL
from npufleet_operator.core.naming import gateway_child, slug
from support.certificate import write_certificate
from support.team import Json, Team, settled
from support.tiny_model import write_tiny_model

CLASSES = [
    {"name": "chat", "priority": 3, "minPercent": 20, "maxPercent": 50},
    {"name": "document", "priority": 2, "minPercent": 30, "maxPercent": 60, "claimable": True},
    {"name": "code", "priority": 1, "minPercent": 10, "maxPercent": 40, "claimable": True},
]
SHARES = {"chat": 0.5, "document": 0.4, "code": 0.1}
"""Guarantees first; what nobody is guaranteed is lent by priority, up to the ceilings."""


def _ask(team: Team, key: str | None = None, **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        sent["authorization"] = f"Bearer {key}"
    body = {"model": f"{team.namespace}/tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return httpx.post(f"http://{team.address}/v1/chat/completions", json=body, headers=sent, timeout=60)


def test_keys_decide_who_may_ask_for_what_and_are_changed_without_a_restart(own_pool: Callable[..., Team]) -> None:
    name = "gateway-keys"
    team = own_pool(classes=CLASSES, gateway={"apiKeysSecretName": name})
    cluster = team.kubectl.cluster

    def give(**keys: Json) -> None:
        data = {key: json.dumps(value) for key, value in keys.items()}
        apply(cluster, [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": NAMESPACE}, "stringData": data}])

    try:
        team.apply_model("tiny")
        team.wait_ready("tiny")
        assert settled("the door to be closed", lambda: _ask(team, "sk-first-key").status_code) == 401
        give(first={"key": "sk-first-key", "class": "code"}, other={"key": "sk-other-key", "models": ["nobody/*"]})
        settled("the key to be known", lambda: _ask(team, "sk-first-key").status_code == 200, 150)
        assert _ask(team).status_code == 401
        assert _ask(team, "sk-other-key").status_code == 403
        assert _ask(team, "sk-first-key", x_npufleet_class="document").status_code == 403
        give(first={"key": "sk-second-key", "requestsPerMinute": 2})
        settled("the key to be changed", lambda: _ask(team, "sk-second-key").status_code == 200, 150)
        assert _ask(team, "sk-first-key").status_code == 401
        assert _ask(team, "sk-second-key", x_npufleet_class="document").status_code == 200
        refused = _ask(team, "sk-second-key")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")

        def log() -> str:
            return cluster.run_kubectl("-n", NAMESPACE, "logs", f"deployment/{gateway_child(team.pool)}")

        def served_classes() -> set[str]:
            lines = [json.loads(line) for line in log().splitlines() if line.startswith("{")]
            return {line.get("workload_class") for line in lines if line.get("status") == 200}

        settled("the access log to be written", lambda: served_classes() == {"code", "chat", "document"}, 30)
        assert not any(key in log() for key in ("sk-first", "sk-second", "sk-other"))
    finally:
        cluster.run_kubectl("-n", NAMESPACE, "delete", "secret", name, "--ignore-not-found")


def test_a_pool_may_serve_its_clients_with_tls_alone_while_probes_and_reports_go_on(
    own_pool: Callable[..., Team], installed: Cluster, tmp_path: Path
) -> None:
    name = "gateway-tls"
    write_certificate(tmp_path, "gateway")
    files = {file: base64.b64encode((tmp_path / file).read_bytes()).decode() for file in ("tls.crt", "tls.key")}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": name, "namespace": NAMESPACE}}
    apply(installed, [{**secret, "data": files}])
    try:
        team = own_pool(gateway={"tlsSecretName": name, "tlsOnly": True, "hedging": {"budgetPercent": 5}})
        team.apply_model("tiny", slo={"ttftMilliseconds": 60_000})
        team.wait_ready("tiny")
        host, port = _gateway_at(team)
        assert port == GATEWAY_TLS_PORT
        body = {"model": f"{team.namespace}/tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

        def ask(url: str) -> int:
            return httpx.post(f"{url}/v1/chat/completions", json=body, verify=False, timeout=60).status_code  # noqa: S501 - a certificate of the test's own

        settled("an answer", lambda: ask(f"https://{host}:{port}") == 200)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{host}:{GATEWAY_PORT}/v1/models", timeout=5)
        pod = _gateway_pod(team)
        assert ask(f"http://{pod['status']['podIP']}:{GATEWAY_PORT}") == 403
        settled("SLO figures by the operator's polls", lambda: _requests(team))
        assert sum(status["restartCount"] for status in pod["status"]["containerStatuses"]) == 0
    finally:
        installed.run_kubectl("-n", NAMESPACE, "delete", "secret", name, "--ignore-not-found")


def _gateway_at(team: Team) -> tuple[str, int]:
    service = json.loads(team.kubectl.cluster.run_kubectl("-n", NAMESPACE, "get", "service", gateway_child(team.pool), "-o", "json"))
    (port,) = service["spec"]["ports"]
    return service["spec"]["clusterIP"], port["port"]


def _gateway_pod(team: Team) -> Json:
    selector = f"{COMPONENT_LABEL}=gateway,{POOL_LABEL}={slug(team.pool)}"
    (pod,) = json.loads(team.kubectl.cluster.run_kubectl("-n", NAMESPACE, "get", "pods", "-l", selector, "-o", "json"))["items"]
    return dict(pod)


def _requests(team: Team) -> bool:
    pool = json.loads(team.kubectl.cluster.run_kubectl("get", "npool", team.pool, "-o", "json"))
    url = f"https://{gateway_child(team.pool)}.{NAMESPACE}.svc:{GATEWAY_TLS_PORT}/v1"
    model = json.loads(team.kubectl("get", "amodel", "tiny", "-o", "json"))
    return bool(pool["status"]["endpoint"] == url and model["status"].get("slo", {}).get("requests"))


@pytest.mark.timeout(600)
def test_two_gateways_are_restarted_under_load_without_a_failed_request(own_pool: Callable[..., Team]) -> None:
    team = own_pool(gateway={"replicas": 2})
    cluster, deployment = team.kubectl.cluster, gateway_child(team.pool)
    team.apply_model("tiny")
    team.wait_ready("tiny")
    cluster.run_kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{deployment}", "--timeout=120s")
    settled("both gateways to serve", lambda: all(team.chat("tiny") for _ in range(6)), 60)
    with team.traffic("tiny", clients=4, max_tokens=24) as traffic:
        settled("traffic", lambda: traffic.complete > 10)
        cluster.run_kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{deployment}")
        cluster.run_kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{deployment}", "--timeout=300s")
        asked = traffic.complete
        settled("traffic through the new gateways", lambda: traffic.complete > asked + 20, 120)
    assert traffic.outcomes.failures == []


@pytest.mark.timeout(600)
def test_three_classes_that_saturate_a_model_get_their_entitlements(own_pool: Callable[..., Team], tiny_folder: Path) -> None:
    team = own_pool(classes=CLASSES)
    team.add_volume("long", write_tiny_model(tiny_folder.parent / "fair", max_positions=2048))
    team.apply_model("tiny", model={"uri": "pvc://long"}, engine={"maxNumSequences": 18})
    team.wait_ready("tiny")
    team.wait_routed("tiny")
    metric = f"http://{team.address}/report"

    def limit() -> bool:
        models = [model for model in httpx.get(metric, timeout=30).json()["models"] if model["namespace"] == team.namespace]
        reports = [replica["report"] for model in models for replica in model["replicas"]]
        return any(report and report["engine"] and report["engine"]["max_running"] == 18 for report in reports)

    settled("the engine's limit to be reported", limit, 60)
    served = asyncio.run(_saturate(team))
    total = sum(served.values())
    for name, share in SHARES.items():
        assert served[name] / total == pytest.approx(share, abs=0.05), served


async def _saturate(team: Team) -> Counter[str]:
    """Streams of each class that were served, all of one length, while every class had more clients than slots."""
    served: Counter[str] = Counter()
    problems: list[str] = []
    url = f"http://{team.address}/v1/chat/completions"
    loop = asyncio.get_running_loop()
    warm, end = loop.time() + 8, loop.time() + 40
    body = {
        "model": f"{team.namespace}/tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
    }

    async def client(session: aiohttp.ClientSession, name: str) -> None:
        headers = {} if name == "chat" else {"x-npufleet-class": name}
        while loop.time() < end:
            began = loop.time()
            try:
                async with session.post(url, json=body, headers=headers) as response:
                    text = await response.text()
            except aiohttp.ClientError as error:
                problems.append(f"{name}, {loop.time() - began:.1f} s: {type(error).__name__} {error}")
                return
            if response.status != 200 or not text.endswith("data: [DONE]\n\n"):
                problems.append(f"{name}, {loop.time() - began:.1f} s: {response.status} {text[-300:]}")
                return
            if warm < loop.time() < end:
                served[name] += 1

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session, asyncio.TaskGroup() as group:
        for name in SHARES:
            for _ in range(28):
                group.create_task(client(session, name))
    assert problems == []
    return served
