"""Killing each process of the cluster: it comes back, and pods that run do not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from devcluster import Cluster
from devcluster.errors import CommandError, ComponentError
from devcluster.pods import FOREVER, container, pod
from devcluster.testing import Kubectl, wait_until

pytestmark = pytest.mark.e2e

COMPONENTS = (
    "etcd",
    "containerd",
    "npu",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "coredns",
    "kubelet",
)


@pytest.fixture
def steady(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, healthy before and after the test."""
    cluster.wait_healthy()
    yield cluster
    for component in COMPONENTS:
        cluster.start(component)
    cluster.wait_healthy()


def container_of(kubectl: Kubectl, name: str) -> str:
    """The id of the pod's one container."""
    return str(kubectl.get("pod", name)["status"]["containerStatuses"][0]["containerID"])


def test_the_list_of_components_is_complete(cluster: Cluster) -> None:
    assert {process.name for process in cluster.processes()} - {"supervisor", "kwok"} == set(COMPONENTS)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_killed_component_comes_back_and_running_pods_do_not_notice(kubectl: Kubectl, steady: Cluster, component: str) -> None:
    cards = {"resources": {"limits": {steady.settings.npu.resource_name: "1"}}}
    kubectl.apply(pod("before", [container("c", FOREVER, **cards)]))
    kubectl.wait_pod_ready("before")
    running = container_of(kubectl, "before")
    old = {process.name: process for process in steady.processes()}[component]

    steady.kill(component)

    wait_until("the restart", lambda: {p.name: p for p in steady.processes()}[component].restarts == old.restarts + 1)
    steady.wait_healthy()
    new = {process.name: process for process in steady.processes()}[component]
    assert new.pid != old.pid
    kubectl.wait("the API server to answer", lambda: kubectl("get", "pods", "-o", "name"))
    # A new pod needs every component: scheduler, kubelet, containerd, the device plugin, and DNS and Services for the request.
    program = f"import socket; socket.create_connection(('kubernetes.default', 443), 10); print('reached', flush=True); {FOREVER}"

    def accepted() -> bool:
        kubectl.apply(pod("after", [container("c", program, **cards)]))
        return True

    kubectl.wait("a new pod to be accepted", accepted)
    kubectl.wait("the new pod to reach the API server by name", lambda: kubectl("logs", "after") == "reached\n", timeout_seconds=90)
    assert container_of(kubectl, "before") == running


def test_a_stopped_api_server_stays_away_until_it_is_started(kubectl: Kubectl, steady: Cluster) -> None:
    steady.stop("kube-apiserver")
    with pytest.raises(CommandError, match="refused"):
        kubectl("get", "pods")
    stopped = {process.name: process for process in steady.processes()}["kube-apiserver"]
    assert (stopped.pid, stopped.healthy, stopped.stopped) == (None, False, True)
    steady.start("kube-apiserver")
    steady.wait_healthy(["kube-apiserver"])
    assert kubectl("get", "pods") == ""


def test_unknown_components_and_cards_are_named_with_what_there_is(steady: Cluster) -> None:
    with pytest.raises(ComponentError, match="no component 'kube-dns'; there are etcd, containerd"):
        steady.kill("kube-dns")
    with pytest.raises(ComponentError, match="no card 99: the node has cards 0 to"):
        steady.npu_fail(99)
