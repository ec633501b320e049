"""Clusters come up, survive, and go without a trace. These tests make clusters of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import devcluster
from devcluster import Cluster, NpuSettings, cgroups
from devcluster.errors import CommandError, NotRunningError
from devcluster.pods import FOREVER, container, pod
from devcluster.testing import Kubectl, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAMESPACES = ("net", "mnt", "pid", "uts", "ipc", "cgroup")


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def firewall() -> str:
    """The host's iptables rules, without the comments that carry the time."""
    saved = [output(f"{family}-{kind}-save") for family in ("iptables", "ip6tables") for kind in ("nft", "legacy")]
    return "\n".join(line for text in saved for line in text.splitlines() if not line.startswith(("#", ":")))


def namespaces_of(process_id: int) -> set[str]:
    return {str(Path(f"/proc/{process_id}/ns/{kind}").readlink()) for kind in NAMESPACES}


@dataclass(frozen=True)
class Traces:
    """How to recognise what belongs to one cluster, learned while it runs."""

    group: str
    data_dir: Path
    link: str
    addresses: tuple[str, str]
    namespaces: frozenset[str]

    @classmethod
    def of(cls, cluster: Cluster) -> Traces:
        plan = cluster.settings.network
        supervisor = cluster.processes()[0].pid
        assert supervisor is not None
        own = namespaces_of(supervisor) - namespaces_of(os.getpid())
        assert len(own) == len(NAMESPACES)
        return cls(cluster.layout.group, cluster.data_dir, plan.host_link, (str(plan.pods), str(plan.services)), frozenset(own))

    def left(self) -> list[str]:
        """What is still there: processes, mounts, namespaces, links, routes, cgroups, files."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                group, command = (entry / "cgroup").read_text(), (entry / "cmdline").read_bytes()
                spaces = namespaces_of(int(entry.name))
            except OSError:
                continue
            if f"devcluster-{self.group}" in group or str(self.data_dir).encode() in command or spaces & self.namespaces:
                found.append(f"process {entry.name} {command!r}")
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if str(self.data_dir) in line or any(space in line for space in self.namespaces)]
        found += [f"link {link['ifname']}" for link in json.loads(output("ip", "-json", "link")) if link["ifname"] == self.link]
        routes = json.loads(output("ip", "-json", "-4", "route", "show", "table", "all"))
        found += [f"route {route}" for route in routes if route.get("dst") in self.addresses or route.get("dev") == self.link]
        for hierarchy in cgroups.hierarchies():
            found += [f"cgroup {path}" for path in hierarchy.mount_point.glob(f"devcluster-{self.group}")]
        if self.data_dir.exists():
            found.append(f"data directory {self.data_dir}")
        return found


def kill_everything(cluster: Cluster) -> None:
    """SIGKILL to every process of the cluster, containers and launcher included."""
    everything = cgroups.processes(cluster.layout.group)
    assert {process.pid for process in cluster.processes()} < everything
    for process_id in everything:
        try:
            os.kill(process_id, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def names() -> Iterator[tuple[str, str]]:
    """Two names for clusters; whatever the test leaves of them is removed."""
    pair = (f"t-{uuid.uuid4().hex[:8]}", f"t-{uuid.uuid4().hex[:8]}")
    yield pair
    for name in pair:
        devcluster.down(name)


def test_two_clusters_do_not_collide_and_leave_nothing_even_after_kill_9_of_everything(names: tuple[str, str]) -> None:
    before = firewall()
    with ThreadPoolExecutor() as pool:  # at the same time, so that they also compete for addresses
        first, second = pool.map(lambda name: devcluster.up(name, NpuSettings(count=2)), names)
    clients = [Kubectl(cluster, "default") for cluster in (first, second)]
    traces = [Traces.of(cluster) for cluster in (first, second)]
    assert first.settings.server != second.settings.server
    for client in clients:
        client.apply(pod("same-name", [container("c", f"print('{client.cluster.name}', flush=True); {FOREVER}")]))
    for client in clients:
        client.wait_pod_ready("same-name")
        assert client.wait("its own log", partial(client, "logs", "same-name")) == f"{client.cluster.name}\n"
    assert all(trace.left() for trace in traces), "the check must see a running cluster"

    kill_everything(first)
    assert devcluster.down(first.name)
    assert traces[0].left() == []
    assert clients[1]("logs", "same-name") == f"{second.name}\n", "the other cluster was touched"

    launcher = json.loads(second.layout.launcher.read_text())["pid"]
    os.kill(launcher, signal.SIGKILL)
    wait_until("its processes to end with the launcher", lambda: not cgroups.processes(second.layout.group))
    assert devcluster.down(second.name)
    assert traces[1].left() == []
    assert firewall() == before
    assert devcluster.down(second.name) is False


def test_up_resumes_what_was_killed_with_its_data_and_changes_nothing_when_all_is_well(names: tuple[str, str]) -> None:
    name = names[0]
    cluster = devcluster.up(name, npus=2)
    client = Kubectl(cluster, "default")
    client("create", "configmap", "kept", "--from-literal=a=b")
    client.apply(pod("p", [container("c", FOREVER)]))
    client.wait_pod_ready("p")
    processes = cluster.processes()

    assert devcluster.up(name).settings == cluster.settings
    assert cluster.processes() == processes

    kill_everything(cluster)
    wait_until("the processes to end", lambda: not cgroups.processes(cluster.layout.group))
    with pytest.raises(NotRunningError, match=f"devcluster up --name {name}"):
        cluster.processes()
    again = devcluster.up(name)
    assert again.settings == cluster.settings
    assert client.get("configmap", "kept")["data"] == {"a": "b"}
    client.wait("the pod to be started again", lambda: client.get("pod", "p")["status"]["containerStatuses"][0]["restartCount"] == 1)
    client.wait_pod_ready("p")

    assert devcluster.down(name, keep_data=True)
    assert cluster.data_dir.exists()
    assert not cgroups.processes(cluster.layout.group)
    devcluster.up(name)
    assert client.get("configmap", "kept")["data"] == {"a": "b"}


def test_more_cards_can_be_had_without_a_new_cluster_and_pods_keep_running(names: tuple[str, str]) -> None:
    name = names[0]
    cluster = devcluster.up(name, NpuSettings(count=2))
    client = Kubectl(cluster, "default")
    client.apply(pod("p", [container("c", FOREVER, resources={"limits": {"huawei.com/Ascend910": "2"}})]))
    before = client.wait_pod_ready("p")["status"]["containerStatuses"][0]["containerID"]
    bigger = devcluster.up(name, NpuSettings(count=4, unit=2, resource_name="huawei.com/Ascend910"))
    node = json.loads(bigger.run_kubectl("get", "node", bigger.node_name, "-o", "json"))
    assert node["status"]["capacity"]["huawei.com/Ascend910"] == "4"
    assert client.wait_pod_ready("p")["status"]["containerStatuses"][0]["containerID"] == before
    # Modules of two: one card alone is refused by the plugin, and the kubelet fails the pod.
    client.apply(pod("odd", [container("c", FOREVER, resources={"limits": {"huawei.com/Ascend910": "1"}})], restartPolicy="Never"))
    refused = client.wait_pod_phase("odd", "Failed")
    assert refused["status"]["reason"] == "UnexpectedAdmissionError"
    assert "modules of 2" in refused["status"]["message"]


def test_an_address_range_that_the_host_routes_elsewhere_is_passed_over_and_named(names: tuple[str, str]) -> None:
    cluster = devcluster.up(names[0], npus=0)
    devcluster.down(names[0], keep_data=True)
    taken = str(cluster.settings.network.services)
    output("ip", "route", "add", "blackhole", taken)
    try:
        with pytest.raises(devcluster.DevclusterError, match=taken):
            devcluster.up(names[0])
        other = devcluster.up(names[1], npus=0)
        assert other.settings.network_index != cluster.settings.network_index
    finally:
        output("ip", "route", "del", "blackhole", taken)


def test_fake_nodes_take_pods_beside_the_real_node(names: tuple[str, str]) -> None:
    cluster = devcluster.up(names[0], npus=1)
    cluster.add_fake_nodes(20, npus=16)
    assert len(cluster.fake_node_names()) == 20
    cluster.add_fake_nodes(1, npus=16, tainted=False)
    assert "fake-20" in cluster.fake_node_names()
    client = Kubectl(cluster, "default")
    tolerations = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    wanted = {"resources": {"limits": {"huawei.com/Ascend910": "16"}}}
    for index in range(21):
        client.apply(pod(f"p-{index}", [container("c", FOREVER, **wanted)], tolerations=tolerations))
    for index in range(21):
        client.wait_pod_ready(f"p-{index}")
    assert {p["spec"]["nodeName"] for p in client.list("pods")} == {f"fake-{index}" for index in range(21)}
    client("delete", "pod", "p-0")
    cluster.remove_fake_nodes()
    assert cluster.fake_node_names() == []
    with pytest.raises(CommandError, match="not found"):
        cluster.run_kubectl("get", "node", "fake-1")
