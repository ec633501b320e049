"""Plans and applies of the operator with many nodes and models.

    python -m benchmarks.operator_scale --nodes 1000 --models 500 --json

`plan_ms` is the time of a plan at rest in the operator's process, waiting for a processor included, `plan_processor_ms` the processor
time of it; `plan_cpu_ms` the processor time that a plan of the same size takes in a process of its own. The control plane is real
(tools/devcluster, named by DEVCLUSTER_NAME), nodes and pods are played by kwok, one pretend gateway reports a steady load for every pod.
The operator is the operator, as a process of its own on this machine. The cluster is taken down at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client.parser import text_string_to_metric_families

import devcluster
from benchmarks.operator_scale.gateway import PretendGateway
from benchmarks.operator_scale.objects import (
    CLASSES,
    GATEWAY_ADDRESS,
    GATEWAY_POD,
    REPLICAS,
    SYSTEM,
    TEAM,
    gateway_pod,
    model,
    model_name,
    pool,
    volume,
)
from benchmarks.operator_scale.planning import plan_time
from benchmarks.operator_scale.watch import PodWatch
from npufleet_operator.core.observed import PodView
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.kinds import MODEL

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_PORT = 19090
SETTLE_SECONDS = 600
QUIET_SECONDS = 45
"""Longer than every period in which npufleet writes figures."""
REST_SECONDS = 60
CHANGE_INTERVAL_SECONDS = 0.5
CHANGE_SECONDS = 60
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
STAGES = ("observe", "apply", "publish")
"""Of a cycle, besides the plan."""
Figures = dict[str, float]


def say(text: str) -> None:
    """Progress."""
    print(f"operator_scale: {text}", file=sys.stderr, flush=True)


async def figures(session: aiohttp.ClientSession) -> Figures:
    """Requests, writes and plans of the operator so far."""
    async with session.get(f"http://127.0.0.1:{OPERATOR_PORT}/metrics") as response:
        text = await response.text()
    found = {"requests": 0.0, "writes": 0.0, "plans": 0.0, "plan_seconds": 0.0, "plan_cpu_seconds": 0.0}
    found |= {f"{stage}_seconds": 0.0 for stage in STAGES}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "npufleet_operator_api_requests_total":
                found["requests"] += sample.value
                found["writes"] += sample.value if sample.labels["method"] in WRITES else 0
            elif sample.name == "npufleet_operator_plan_seconds_count":
                found["plans"] += sample.value
            elif sample.name == "npufleet_operator_plan_cpu_seconds_total":
                found["plan_cpu_seconds"] += sample.value
            elif sample.name == "npufleet_operator_cycle_stage_seconds_sum" and sample.labels["stage"] in STAGES:
                found[f"{sample.labels['stage']}_seconds"] += sample.value
            elif sample.name == "npufleet_operator_plan_seconds_sum":
                found["plan_seconds"] += sample.value
    return found


def memory_mb(pid: int) -> float:
    """Largest resident set of a process so far, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) * 1024 / 1e6, 1)
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM")


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Run:
    """One measurement on one cluster."""

    def __init__(self, cluster: devcluster.Cluster, nodes: int, models: int, changes: int) -> None:
        self.cluster, self.nodes, self.models, self.changes = cluster, nodes, models, changes
        pods: dict[str, PodView] = {}
        self.watch = PodWatch(pods)
        self.gateway = PretendGateway({model_name(i): CLASSES[i % len(CLASSES)] for i in range(models)})
        self.gateway.pods = pods

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """kubectl, off the loop."""
        return await asyncio.to_thread(self.cluster.run_kubectl, *arguments, stdin=stdin, timeout_seconds=None)

    async def apply(self, *objects: Any) -> None:
        """Create or change objects."""
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        await self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(body))

    async def prepare(self) -> None:
        """Fake nodes, CRDs, namespaces, the pretend gateway's pod; the real node takes no pods, so no other gateway runs."""
        missing = self.nodes - len(await asyncio.to_thread(self.cluster.fake_node_names))
        if missing > 0:
            say(f"adding {missing} fake nodes")
            await asyncio.to_thread(self.cluster.add_fake_nodes, missing, 8, progress=say)
        await self.kubectl("cordon", self.cluster.node_name)
        for crd in sorted((ROOT / "crds").glob("*.yaml")):
            await self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
        await self.kubectl("wait", "--for=condition=Established", "crd/npupools.npufleet.dev", "crd/ascendmodels.npufleet.dev")
        await self.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (SYSTEM, TEAM)))
        await self.kubectl("-n", SYSTEM, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
        await self.apply(gateway_pod("fake-0"), *volume())
        await self.kubectl("-n", SYSTEM, "wait", "--for=condition=Ready", f"pod/{GATEWAY_POD}", "--timeout=60s")
        status = {"status": {"podIP": GATEWAY_ADDRESS, "podIPs": [{"ip": GATEWAY_ADDRESS}]}}
        await self.kubectl("-n", SYSTEM, "patch", "pod", GATEWAY_POD, "--subresource=status", "--type=merge", "-p", json.dumps(status))

    async def start_operator(self, log: Path) -> asyncio.subprocess.Process:
        """The operator, as its container would run it."""
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        command = [str(Path(sys.executable).parent / "npufleet-operator"), "run", "--namespace", SYSTEM]
        command += ["--control-image", "pretend/control-plane:1", "--port", str(OPERATOR_PORT), "--log-level", "info"]
        with log.open("wb") as file:
            return await asyncio.create_subprocess_exec(*command, env=environment, stdout=file, stderr=file)

    async def settle(self, session: aiohttp.ClientSession) -> float:
        """Until every model has its ready replicas and the operator has written nothing for a while; the seconds until all were ready."""
        started = time.monotonic()
        ready_after, last, since = None, -1.0, started
        while time.monotonic() - started < SETTLE_SECONDS:
            await asyncio.sleep(2)
            ready = sum(pod.engine_ready for pod in self.gateway.pods.values())
            try:
                writes = (await figures(session))["writes"]
            except aiohttp.ClientError:
                continue
            if ready >= REPLICAS * self.models and ready_after is None:
                ready_after = time.monotonic() - started
                say(f"{ready} replicas ready after {ready_after:.0f} s")
            if writes != last:
                last, since = writes, time.monotonic()
            if ready_after is not None and time.monotonic() - since > QUIET_SECONDS:
                return ready_after
        pods = len(self.gateway.pods)
        raise RuntimeError(f"not at rest after {SETTLE_SECONDS} s: {pods} pods, {last:.0f} writes; see the operator's log")

    async def latencies(self, seed: int) -> list[float]:
        """Seconds from a change of a model to the pod that it asks for, seen by a watch."""
        chosen = random.Random(seed).sample(range(self.models), min(self.changes, self.models))  # noqa: S311 - a benchmark
        known = set(self.watch.seen)
        sent: dict[str, float] = {}
        configuration = Configuration()
        await kube_config.load_kube_config(config_file=str(self.cluster.kubeconfig), client_configuration=configuration)
        async with KubeClient(ApiClient(configuration)) as client:  # kubectl takes a whole processor to start
            for index in chosen:
                patch = {"spec": {"scaling": {"minReplicas": REPLICAS + 1}}}
                sent[model_name(index)] = time.monotonic()
                await client.merge(MODEL, TEAM, model_name(index), patch, "operator-scale")
                await asyncio.sleep(CHANGE_INTERVAL_SECONDS)
        deadline = time.monotonic() + CHANGE_SECONDS
        found: dict[str, float] = {}
        while len(found) < len(sent) and time.monotonic() < deadline:
            for uid, at in self.watch.seen.items():
                pod = self.gateway.pods.get(uid)
                if uid not in known and pod is not None and pod.owner_name in sent:
                    found.setdefault(pod.owner_name, at - sent[pod.owner_name])
            await asyncio.sleep(0.2)
        if len(found) < len(sent):
            raise RuntimeError(f"{len(sent) - len(found)} of {len(sent)} changes were not applied within {CHANGE_SECONDS} s")
        return list(found.values())

    async def measure(self, seed: int, log: Path) -> dict[str, Any]:
        """Everything."""
        await self.prepare()
        async with AsyncExitStack() as stack:
            runner = await self.gateway.start()
            stack.push_async_callback(runner.cleanup)
            watching = asyncio.create_task(self.watch.run(self.cluster.kubeconfig, TEAM))
            stack.push_async_callback(asyncio.wait, [watching])
            stack.callback(watching.cancel)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            say(f"applying {self.models} models")
            await self.apply(pool(self.cluster.settings.npu.resource_name), *(model(i) for i in range(self.models)))
            operator = await self.start_operator(log)
            stack.push_async_callback(_stop, operator)
            ready_after = await self.settle(session)
            say(f"at rest; counting for {REST_SECONDS} s")
            before, polls = await figures(session), self.gateway.reports
            await asyncio.sleep(REST_SECONDS)
            after = await figures(session)
            polls = self.gateway.reports - polls
            say(f"changing {min(self.changes, self.models)} models")
            waits = await self.latencies(seed)
            end = await figures(session)
            return {
                "nodes": self.nodes,
                "models": self.models,
                "pods": len(self.gateway.pods),
                "plan_ms": _mean_ms(before, after),
                "plan_processor_ms": _mean_ms(before, after, "plan_cpu"),
                "plan_under_change_ms": _mean_ms(after, end),
                **{f"{stage}_under_change_ms": _mean_ms(after, end, stage) for stage in STAGES},
                "apply_p50_s": round(percentile(waits, 0.5), 3),
                "apply_p99_s": round(percentile(waits, 0.99), 3),
                "changes": len(waits),
                "rest_requests_per_minute": round((after["requests"] - before["requests"]) * 60 / REST_SECONDS, 1),
                "rest_writes_per_minute": round((after["writes"] - before["writes"]) * 60 / REST_SECONDS, 1),
                "rest_gateway_polls_per_minute": round(polls * 60 / REST_SECONDS, 1),
                "memory_mb": memory_mb(operator.pid),
                "ready_after_s": round(ready_after, 1),
            }


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    await process.wait()


def _mean_ms(before: Figures, after: Figures, what: str = "plan") -> float | None:
    plans = after["plans"] - before["plans"]
    seconds = f"{what}_seconds"
    return round(1000 * (after[seconds] - before[seconds]) / plans, 1) if plans else None


def main() -> None:
    """Print the figures, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000, help="fake nodes of eight NPUs")
    parser.add_argument("--models", type=int, default=500, help=f"models with {REPLICAS} replicas each")
    parser.add_argument("--changes", type=int, default=100, help="models that are changed, one after the other")
    parser.add_argument("--seed", type=int, default=1)
    log = Path(tempfile.gettempdir()) / "operator_scale.log"
    parser.add_argument("--operator-log", type=Path, default=log, help="where the operator's log goes")
    parser.add_argument("--plan-only", action="store_true", help="processor time of a plan on a simulated pool; needs no cluster")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    alone = plan_time(options.nodes, options.models)
    planned = {"plan_cpu_ms": alone.median_ms, "plan_cpu_longest_ms": alone.longest_ms}
    if options.plan_only:
        show(planned, as_json=options.json)
        return
    name = os.environ.get("DEVCLUSTER_NAME", "scale")
    cluster = devcluster.up(name, checkout=ROOT, progress=say)
    try:
        found = asyncio.run(Run(cluster, options.nodes, options.models, options.changes).measure(options.seed, options.operator_log))
    finally:
        if not options.keep:
            devcluster.down(name, progress=say)
    show({**found, **planned}, as_json=options.json)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """One JSON object, or a line each."""
    print(json.dumps(found, indent=2) if as_json else "\n".join(f"{key:30} {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()
