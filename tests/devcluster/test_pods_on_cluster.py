"""What pods get on the cluster: the behaviour of a real kubelet, container runtime, network and device manager."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import devcluster
from devcluster import Cluster
from devcluster.errors import CommandError
from devcluster.images import archive, pause_image
from devcluster.pods import FOREVER, container, pod
from devcluster.testing import Kubectl

pytestmark = pytest.mark.e2e

SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["HOSTNAME"].encode())
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


def allocatable(cluster: Cluster) -> tuple[int, int]:
    """(allocatable, capacity) of the node's cards."""
    status = json.loads(cluster.run_kubectl("get", "node", cluster.node_name, "-o", "json"))["status"]
    resource = cluster.settings.npu.resource_name
    return int(status["allocatable"][resource]), int(status["capacity"][resource])


def test_a_restricted_pod_sees_the_hosts_python_and_the_checkout_but_cannot_write_them(kubectl: Kubectl) -> None:
    program = """
import os, sys, devcluster
print(os.getuid(), sys.prefix, devcluster.__file__, flush=True)
for path in (devcluster.__file__, sys.prefix, "/usr", "/"):
    print(bool(os.statvfs(path).f_flag & os.ST_RDONLY), flush=True)
"""
    kubectl.apply(pod("reader", [container("c", program)], restartPolicy="Never"))
    kubectl.wait_pod_phase("reader", "Succeeded")
    identity, *read_only = kubectl("logs", "reader").strip().splitlines()
    assert identity == f"65532 {sys.prefix} {devcluster.__file__}"
    assert read_only == ["True"] * 4


def test_names_resolve_services_answer_and_the_api_server_is_reached_from_a_pod(kubectl: Kubectl, cluster: Cluster) -> None:
    kubectl.apply(
        pod(
            "server",
            [container("c", SERVER, readinessProbe={"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1})],
            labels={"app": "s"},
        ),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "s"}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
    )
    kubectl.wait_pod_ready("server")
    program = f"""
import socket, ssl, time, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
context = ssl.create_default_context(cafile=account + "ca.crt")
for attempt in range(50):
    try:
        print(urllib.request.urlopen("http://web", timeout=2).read().decode())
        break
    except OSError:
        time.sleep(0.2)
print(urllib.request.urlopen("http://web.{kubectl.namespace}.svc.cluster.local").read().decode())
print(urllib.request.urlopen("https://kubernetes.default/livez", context=context).read().decode())
print(b"npu_chip_info_utilization" in urllib.request.urlopen("http://npu-exporter.npu-exporter:8082/metrics").read())
try:
    socket.getaddrinfo("name.invalid", 80)
except socket.gaierror:
    print("no such name")
"""
    kubectl.apply(pod("client", [container("c", program)], restartPolicy="Never"))
    kubectl.wait_pod_phase("client", "Succeeded")
    assert kubectl("logs", "client").split("\n")[:5] == ["server", "server", "ok", "True", "no such name"]
    # The host reaches Services and pods by the same addresses.
    for address in (kubectl.get("service", "web")["spec"]["clusterIP"] + ":80", kubectl.get("pod", "server")["status"]["podIP"] + ":8000"):
        with urllib.request.urlopen(f"http://{address}", timeout=10) as answer:
            assert answer.read() == b"server"


def test_logs_exec_and_port_forward_reach_the_container(kubectl: Kubectl) -> None:
    kubectl.apply(pod("p", [container("c", f"print('hello', flush=True)\n{SERVER}")]))
    kubectl.wait_pod_ready("p")
    kubectl.wait("the log line", lambda: kubectl("logs", "p") == "hello\n")
    assert kubectl("exec", "p", "--", "python3", "-c", "print(6 * 7)") == "42\n"
    with pytest.raises(CommandError, match="status 7"):
        kubectl("exec", "p", "--", "python3", "-c", "raise SystemExit(7)")
    config = f"--kubeconfig={kubectl.cluster.kubeconfig}"
    command = [str(kubectl.cluster.kubectl), config, f"--namespace={kubectl.namespace}", "port-forward", "p", ":8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        address = forward.stdout.readline().split()[2]
        with urllib.request.urlopen(f"http://{address}", timeout=10) as answer:
            assert answer.read() == b"p"
        forward.terminate()


def test_a_native_sidecar_starts_before_and_ends_after_the_containers(kubectl: Kubectl) -> None:
    sidecar = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); {FOREVER}"
    main = "print('main', flush=True)"
    kubectl.apply(
        pod("p", [container("main", main)], restartPolicy="Never", initContainers=[container("side", sidecar, restartPolicy="Always")])
    )
    done = kubectl.wait_pod_phase("p", "Succeeded")
    states = {s["name"]: s["state"]["terminated"] for s in [*done["status"]["containerStatuses"], *done["status"]["initContainerStatuses"]]}
    assert states["side"]["startedAt"] <= states["main"]["startedAt"]
    assert states["main"]["finishedAt"] <= states["side"]["finishedAt"]
    assert states["side"]["exitCode"] == 0


def test_startup_and_readiness_probes_hold_a_pod_back_until_they_pass(kubectl: Kubectl) -> None:
    program = f"import time,pathlib; time.sleep(2); pathlib.Path('/scratch/started').touch(); {FOREVER}"
    probe = {"exec": {"command": ["test", "-e", "/scratch/ready"]}, "periodSeconds": 1}
    kubectl.apply(
        pod(
            "p",
            [
                container(
                    "c",
                    program,
                    startupProbe={"exec": {"command": ["test", "-e", "/scratch/started"]}, "periodSeconds": 1, "failureThreshold": 60},
                    readinessProbe=probe,
                    volumeMounts=[{"name": "work", "mountPath": "/scratch"}],
                )
            ],
            volumes=[{"name": "work", "emptyDir": {}}],
        )
    )

    def status() -> dict[str, Any]:
        found: list[dict[str, Any]] = kubectl.get("pod", "p")["status"].get("containerStatuses", [{}])
        return found[0]

    kubectl.wait("the container to run", lambda: "running" in status().get("state", {}))
    kubectl.wait("the startup probe", lambda: status()["started"])
    assert status()["ready"] is False
    kubectl("exec", "p", "--", "touch", "/scratch/ready")
    kubectl.wait_pod_ready("p")


def test_prestop_and_the_grace_period_run_before_the_container_is_killed(kubectl: Kubectl) -> None:
    program = """
import signal, sys, time
def end(*_):
    print("sigterm", flush=True)
    open("/scratch/log", "a").write("sigterm ")
    while True: time.sleep(1)  # ignores it: the grace period must end this
signal.signal(signal.SIGTERM, end)
while True: time.sleep(1)
"""
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 1; printf 'prestop ' >> /scratch/log"]}}}
    mounts = [{"name": "work", "mountPath": "/scratch"}]
    watcher = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
log = pathlib.Path("/scratch/log")
while True:
    print(log.read_text() if log.exists() else "", flush=True)
    time.sleep(0.2)
"""
    kubectl.apply(
        pod(
            "p",
            [container("c", program, lifecycle=hook, volumeMounts=mounts), container("watcher", watcher, volumeMounts=mounts)],
            volumes=[{"name": "work", "emptyDir": {}}],
            terminationGracePeriodSeconds=4,
        )
    )
    kubectl.wait_pod_ready("p")
    command = [
        str(kubectl.cluster.kubectl),
        f"--kubeconfig={kubectl.cluster.kubeconfig}",
        "-n",
        kubectl.namespace,
        "logs",
        "-f",
        "p",
        "-c",
        "watcher",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        kubectl("delete", "pod", "p", "--wait=false")
        kubectl.wait_gone("pod", "p")
        assert follower.stdout is not None
        assert follower.stdout.read().split("\n")[-2] == "prestop sigterm "


def test_cards_are_given_out_and_a_pod_that_finds_none_waits(kubectl: Kubectl, cluster: Cluster) -> None:
    resource, count = cluster.settings.npu.resource_name, cluster.settings.npu.count

    def taking(name: str, cards: int) -> dict[str, Any]:
        program = f"import os; print(os.environ['ASCEND_VISIBLE_DEVICES'], flush=True); {FOREVER}"
        return pod(name, [container("c", program, resources={"limits": {resource: str(cards)}})])

    kubectl.apply(taking("first", count - 2), taking("second", 2))
    for name in ("first", "second"):
        kubectl.wait_pod_ready(name)
    given = [kubectl.wait("the log", partial(kubectl, "logs", name)).strip().split(",") for name in ("first", "second")]
    assert sorted(int(card) for cards in given for card in cards) == list(range(count))
    with urllib.request.urlopen(f"http://{cluster.settings.network.node}:8082/metrics", timeout=10) as answer:
        held = [line for line in answer.read().decode().splitlines() if line.startswith("container_npu_total_memory{")]
    names = [line.split('pod_name="')[1].split('"')[0] for line in held if f'namespace="{kubectl.namespace}"' in line]
    assert sorted(names) == ["first"] * (count - 2) + ["second"] * 2
    kubectl.apply(taking("third", 1))
    kubectl.wait(
        "the scheduler to say why", lambda: "Insufficient" in kubectl("get", "events", "--field-selector=involvedObject.name=third")
    )
    kubectl("delete", "pod", "second", "--wait=false")
    kubectl.wait_pod_ready("third")


def test_a_failed_card_lowers_allocatable_but_not_capacity_and_returns_when_healed(kubectl: Kubectl, cluster: Cluster) -> None:
    count = cluster.settings.npu.count
    cluster.npu_fail(3)
    try:
        kubectl.wait("allocatable to fall", lambda: allocatable(cluster) == (count - 1, count))
        node_service = kubectl.cluster.run_kubectl(
            "get", "service", "npu-exporter", "-n", "npu-exporter", "-o", "jsonpath={.spec.clusterIP}"
        )
        cluster.npu_set(2, "npu_chip_info_utilization", 87)
        with urllib.request.urlopen(f"http://{node_service}:8082/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = {
            (line.split("{")[0], line.split('id="')[1].split('"')[0]): line.split("} ")[1].split()[0] for line in lines if 'id="' in line
        }
        assert values["npu_chip_info_health_status", "3"] == "0.0"
        assert values["npu_chip_info_health_status", "2"] == "1.0"
        assert values["npu_chip_info_utilization", "2"] == "87.0"
    finally:
        cluster.npu_reset()
    kubectl.wait("allocatable to return", lambda: allocatable(cluster) == (count, count))


def test_a_container_over_its_memory_limit_is_killed_for_it(kubectl: Kubectl) -> None:
    greedy = container("c", "held = bytearray(300 << 20); print('too much', flush=True)", resources={"limits": {"memory": "64Mi"}})
    kubectl.apply(pod("p", [greedy], restartPolicy="Never"))
    kubectl.wait_pod_phase("p", "Failed")
    ended = kubectl.get("pod", "p")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_eviction_respects_a_pod_disruption_budget(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("a", [container("c", FOREVER)], labels={"app": "x"}),
        pod("b", [container("c", FOREVER)], labels={"app": "x"}),
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "x"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}},
        },
    )
    for name in ("a", "b"):
        kubectl.wait_pod_ready(name)
    kubectl.wait("the budget to count both", lambda: kubectl.get("pdb", "x")["status"].get("disruptionsAllowed") == 1)

    def evict(name: str) -> str:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": kubectl.namespace}}
        path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
        return kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    evict("a")
    with pytest.raises(CommandError, match="disruption budget"):
        evict("b")
    assert kubectl.get("pod", "b")["metadata"].get("deletionTimestamp") is None


def test_a_failed_test_would_show_events_and_logs(kubectl: Kubectl) -> None:
    kubectl.apply(pod("talker", [container("c", f"print('remember me', flush=True); {FOREVER}")]))
    kubectl.wait_pod_ready("talker")
    kubectl.wait("the log", lambda: kubectl("logs", "talker"))
    with pytest.raises(AssertionError, match=r"(?s)waited 0 s for rain; last seen: False.*Scheduled.*remember me"):
        kubectl.wait("rain", lambda: False, timeout_seconds=0)


def test_an_image_archive_can_be_loaded_and_runs_without_the_host(kubectl: Kubectl, cluster: Cluster, tmp_path: Path) -> None:
    reference = f"devcluster.local/loaded:{kubectl.namespace}"
    file = tmp_path / "image.tar"
    file.write_bytes(pause_image(reference, cluster.settings.binaries["pause"].read_bytes()))
    assert reference in " ".join(cluster.load_image(file))
    kubectl.apply(pod("loaded", [{"name": "c", "image": reference, "imagePullPolicy": "Never"}]))
    kubectl.wait_pod_ready("loaded")
    broken = tmp_path / "broken.tar"
    broken.write_bytes(archive(reference, [], {})[:700])
    with pytest.raises(CommandError, match="is it an image archive"):
        cluster.load_image(broken)
