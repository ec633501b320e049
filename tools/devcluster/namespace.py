"""What the supervisor does first inside its new namespaces: mounts, links, addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from devcluster import cgroups
from devcluster.files import KUBELET_ROOT
from devcluster.paths import Layout
from devcluster.run import run
from devcluster.settings import ClusterSettings

_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
}

# Places that are constants of the kubelet and of the CNI library, to the folder of the data directory that stands for each.
# Shared, one cluster's kubelet would delete what it takes for another's leftovers.
_PRIVATE_FOLDERS = {KUBELET_ROOT: "kubelet", "/var/lib/cni": "cni", "/var/log": "var-log"}


def _mount(*arguments: str) -> None:
    run(["mount", *arguments])


def mounts(layout: Layout) -> None:
    """Private /run, /sys and cgroup mounts, and the kubelet's root at the place its constants name."""
    known = cgroups.hierarchies()
    _mount("--make-rprivate", "/")
    # HostToContainer volume propagation needs a shared tree; it is shared with the cluster's own containers only.
    _mount("--make-rshared", "/")
    _mount("-t", "tmpfs", "-o", "mode=755", "devcluster-run", "/run")
    Path("/run/lock").mkdir()
    # A fresh sysfs shows this network namespace's devices.
    _mount("-t", "sysfs", "sysfs", "/sys")
    if known[0].version == 2:
        _mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
        _leave_cgroup_root(Path("/sys/fs/cgroup"))
    else:
        _mount("-t", "tmpfs", "-o", "mode=755", "cgroup", "/sys/fs/cgroup")
        for hierarchy in known:
            point = Path("/sys/fs/cgroup") / hierarchy.mount_point.name
            point.mkdir()
            _mount("-t", "cgroup", "-o", hierarchy.options, "cgroup", str(point))
    # The host's name servers cannot be reached from here: without this, each reverse look-up would wait for them.
    resolver = Path("/etc/resolv.conf").resolve()
    if resolver.exists():
        _mount("--bind", str(layout.etc / "resolv.conf"), str(resolver))
    for place, folder in _PRIVATE_FOLDERS.items():
        own = layout.root / folder
        own.mkdir(exist_ok=True)
        # On the host such a folder stays empty. It is never removed: that would unmount it in the other clusters.
        Path(place).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(own), place)


def _leave_cgroup_root(root: Path) -> None:
    # Version 2 lets a group have processes or delegate controllers, not both.
    system = root / "system"
    system.mkdir(exist_ok=True)
    (system / "cgroup.procs").write_text("0")
    controllers = (root / "cgroup.controllers").read_text().split()
    (root / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))


def network(settings: ClusterSettings, host_network: int) -> None:
    """A link to the host, the pods' bridge, and the host's routes to this cluster.

    `host_network` is an open file descriptor of the host's network namespace. The routes hang on the link, and the link
    goes with this namespace: nothing is left to clean up on the host.
    """
    plan = settings.network

    def on_host(*arguments: str) -> None:
        nsenter = ["nsenter", f"--net=/proc/self/fd/{host_network}", "ip", *arguments]
        run(nsenter, pass_fds=(host_network,))

    def ip(*arguments: str) -> None:
        run(["ip", *arguments])

    ip("link", "set", "lo", "up")
    on_host("link", "add", plan.host_link, "type", "veth", "peer", "name", "eth0", "netns", "1")
    ip("address", "add", f"{plan.node}/{plan.link_prefix}", "dev", "eth0")
    ip("link", "set", "eth0", "up")
    on_host("address", "add", f"{plan.host}/{plan.link_prefix}", "dev", plan.host_link)
    on_host("link", "set", plan.host_link, "up")
    for reachable in (plan.pods, plan.services):
        on_host("route", "replace", str(reachable), "via", str(plan.node), "dev", plan.host_link)
    ip("route", "add", "default", "via", str(plan.host))
    ip("link", "add", "cni0", "type", "bridge")
    ip("address", "add", f"{plan.bridge}/{plan.node_pods.prefixlen}", "dev", "cni0")
    ip("link", "set", "cni0", "up")
    for name, value in _SYSCTLS.items():
        path = Path("/proc/sys") / name
        if path.exists():
            path.write_text(value)


def enter(settings: ClusterSettings, layout: Layout, host_network: int) -> None:
    """Prepare the namespaces this process was started in."""
    socket.sethostname(settings.node_name)
    mounts(layout)
    network(settings, host_network)


def command(process_id: int, arguments: Sequence[str | Path]) -> list[str | Path]:
    """`arguments` as a command that runs in the mount and network namespaces of `process_id`."""
    return ["nsenter", f"--target={process_id}", "--mount", "--net", *arguments]
