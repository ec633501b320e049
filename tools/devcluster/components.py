"""The processes of a cluster: what runs, in which order, and how to tell that it is healthy (pure)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from devcluster.files import CONTAINERD_SOCKET
from devcluster.paths import Layout
from devcluster.settings import ClusterSettings


@dataclass(frozen=True)
class HttpProbe:
    """Healthy when GET `url` answers 200. `ca_file` is set for https."""

    url: str
    ca_file: Path | None = None


@dataclass(frozen=True)
class SocketProbe:
    """Healthy when the Unix socket accepts a connection."""

    path: str


Probe = HttpProbe | SocketProbe


@dataclass(frozen=True)
class Component:
    """One process that the supervisor keeps running."""

    name: str
    argv: tuple[str, ...]
    probe: Probe
    after: tuple[str, ...] = ()  # components that must be healthy before this one starts
    env: dict[str, str] = field(default_factory=dict)


def node_labels(settings: ClusterSettings) -> dict[str, str]:
    """Labels that Ascend sites find on an 800I A2 node (MindCluster's `k8s.md`)."""
    npu = settings.npu
    if npu.count == 0:
        return {}
    return {
        "accelerator": "huawei-Ascend910",
        "accelerator-type": "module-910b-8",
        "host-arch": "huawei-x86",
        "node.kubernetes.io/npu.chip.name": npu.chip_name,
        "servertype": "Ascend910B-20",
        "workerselector": "dls-worker-node",
    }


def _apiserver(settings: ClusterSettings, layout: Layout, binary: Path) -> Component:
    pki, network = layout.pki, settings.network
    flags = {
        "advertise-address": network.node,
        "allow-privileged": "true",
        "authorization-mode": "Node,RBAC",
        "bind-address": network.node,
        "client-ca-file": pki / "ca.crt",
        "enable-admission-plugins": "NodeRestriction",
        "etcd-servers": "http://127.0.0.1:2379",
        "kubelet-certificate-authority": pki / "ca.crt",
        "kubelet-client-certificate": pki / "apiserver-kubelet.crt",
        "kubelet-client-key": pki / "apiserver-kubelet.key",
        "kubelet-preferred-address-types": "InternalIP",
        "profiling": "false",
        "proxy-client-cert-file": pki / "front-proxy-client.crt",
        "proxy-client-key-file": pki / "front-proxy-client.key",
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-client-ca-file": pki / "front-proxy-ca.crt",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-username-headers": "X-Remote-User",
        "secure-port": "6443",
        "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
        "service-account-key-file": pki / "service-account.pub",
        "service-account-signing-key-file": pki / "service-account.key",
        "service-cluster-ip-range": network.services,
        "tls-cert-file": pki / "apiserver.crt",
        "tls-private-key-file": pki / "apiserver.key",
    }
    probe = HttpProbe(f"{settings.server}/readyz", pki / "ca.crt")
    return Component("kube-apiserver", _argv(binary, flags), probe, after=("etcd",))


def _argv(binary: Path, flags: Mapping[str, object]) -> tuple[str, ...]:
    return (str(binary), *(f"--{name}={value}" for name, value in sorted(flags.items())))


def components(settings: ClusterSettings, layout: Layout) -> tuple[Component, ...]:
    """Every process of the cluster, in an order where each comes after what it waits for."""
    binaries, pki, etc = settings.binaries, layout.pki, layout.etc

    def config_of(user: str) -> Path:
        return layout.component_kubeconfig(user)

    etcd = Component(
        "etcd",
        _argv(
            binaries["etcd"],
            {
                "advertise-client-urls": "http://127.0.0.1:2379",
                "data-dir": layout.root / "etcd",
                "initial-advertise-peer-urls": "http://127.0.0.1:2380",
                "initial-cluster": "default=http://127.0.0.1:2380",
                "listen-client-urls": "http://127.0.0.1:2379",
                "listen-peer-urls": "http://127.0.0.1:2380",
                "log-level": "warn",
                # Survives every kill of a process; only a crash of the machine itself may cost the last writes.
                "unsafe-no-fsync": "true",
            },
        ),
        HttpProbe("http://127.0.0.1:2379/health"),
    )
    containerd = Component(
        "containerd",
        (str(binaries["containerd"]), "--config", str(etc / "containerd.toml")),
        SocketProbe(CONTAINERD_SOCKET),
        env={"PATH": f"{binaries['containerd'].parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    controller_manager = Component(
        "kube-controller-manager",
        _argv(
            binaries["kube-controller-manager"],
            {
                "allocate-node-cidrs": "false",
                "authentication-kubeconfig": config_of("controller-manager"),
                "authorization-kubeconfig": config_of("controller-manager"),
                "bind-address": "127.0.0.1",
                "cluster-signing-cert-file": pki / "ca.crt",
                "cluster-signing-key-file": pki / "ca.key",
                "kubeconfig": config_of("controller-manager"),
                "leader-elect": "false",
                "profiling": "false",
                "root-ca-file": pki / "ca.crt",
                "service-account-private-key-file": pki / "service-account.key",
                "use-service-account-credentials": "true",
            },
        ),
        HttpProbe("https://127.0.0.1:10257/healthz"),
        after=("kube-apiserver",),
    )
    scheduler = Component(
        "kube-scheduler",
        _argv(
            binaries["kube-scheduler"],
            {
                "authentication-kubeconfig": config_of("scheduler"),
                "authorization-kubeconfig": config_of("scheduler"),
                "bind-address": "127.0.0.1",
                "kubeconfig": config_of("scheduler"),
                "leader-elect": "false",
                "profiling": "false",
            },
        ),
        HttpProbe("https://127.0.0.1:10259/healthz"),
        after=("kube-apiserver",),
    )
    kube_proxy = Component(
        "kube-proxy",
        (str(binaries["kube-proxy"]), f"--config={etc / 'kube-proxy.yaml'}"),
        HttpProbe("http://127.0.0.1:10256/livez"),
        after=("kube-apiserver",),
    )
    coredns = Component(
        "coredns",
        (str(binaries["coredns"]), "-conf", str(etc / "Corefile")),
        HttpProbe("http://127.0.0.1:8181/ready"),
        after=("kube-apiserver",),
    )
    kubelet = Component(
        "kubelet",
        _argv(
            binaries["kubelet"],
            {
                "config": etc / "kubelet.yaml",
                "hostname-override": settings.node_name,
                "kubeconfig": config_of("kubelet"),
                "node-ip": settings.network.node,
                "node-labels": ",".join(f"{key}={value}" for key, value in sorted(node_labels(settings).items())),
            },
        ),
        HttpProbe("http://127.0.0.1:10248/healthz"),
        after=("kube-apiserver", "containerd"),
    )
    npu = Component(
        "npu",
        (sys.executable, "-m", "devcluster.npu", str(layout.root)),
        HttpProbe(f"http://{settings.network.node}:8082/metrics"),
    )
    kwok = [_kwok(settings, layout, binaries["kwok"])] if "kwok" in binaries else []
    return (
        etcd,
        containerd,
        npu,
        _apiserver(settings, layout, binaries["kube-apiserver"]),
        controller_manager,
        scheduler,
        kube_proxy,
        coredns,
        kubelet,
        *kwok,
    )


def _kwok(settings: ClusterSettings, layout: Layout, binary: Path) -> Component:
    flags = {
        "cidr": settings.network.fake_pods,
        "config": Path(__file__).with_name("kwok-stages.yaml"),
        "kubeconfig": layout.component_kubeconfig("kwok"),
        "manage-nodes-with-annotation-selector": "kwok.x-k8s.io/node=fake",
        "node-ip": settings.network.host,
        # Renewed every quarter of it: well inside the 50 s after which a silent node counts as lost, and a third of the writes of 40.
        "node-lease-duration-seconds": 120,
        "server-address": "127.0.0.1:10247",
    }
    return Component("kwok", _argv(binary, flags), HttpProbe("http://127.0.0.1:10247/healthz"), ("kube-apiserver",))
