"""Every version devcluster depends on, in one place; go.mod and go.sum of each project pin the rest."""

from __future__ import annotations

from dataclasses import dataclass

KUBERNETES = "1.36.3"
ETCD = "3.6.15"
CONTAINERD = "2.4.2"
COREDNS = "1.14.7"
HELM = "4.3.1"
KWOK = "0.8.0"

_KUBERNETES_MAJOR, _KUBERNETES_MINOR, _ = KUBERNETES.split(".")
_COMPONENT_BASE = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Binary:
    """One executable of a project.

    `version_args` print a line that must contain `version_text` before a binary found on PATH is trusted;
    without them only a build of our own is used.
    """

    name: str
    package: str
    version_args: tuple[str, ...] = ()
    version_text: str = ""


@dataclass(frozen=True)
class Project:
    """One upstream project: a folder under `modules/` with its own go.mod, since their graphs clash when merged."""

    name: str
    version: str
    binaries: tuple[Binary, ...]
    ldflags: str = "-s -w"
    tags: str = ""
    together: bool = False  # its binaries only work with each other: take all from one place


def _kubernetes(name: str, *version_args: str) -> Binary:
    return Binary(
        name,
        f"k8s.io/kubernetes/cmd/{name}",
        version_args or ("--version",),
        f"v{_KUBERNETES_MAJOR}.{_KUBERNETES_MINOR}.",
    )


PROJECTS: tuple[Project, ...] = (
    Project(
        "kubernetes",
        KUBERNETES,
        (
            _kubernetes("kube-apiserver"),
            _kubernetes("kube-controller-manager"),
            _kubernetes("kube-scheduler"),
            _kubernetes("kubelet"),
            _kubernetes("kubectl", "version", "--client"),
            _kubernetes("kube-proxy"),
        ),
        ldflags=(
            f"-s -w -X {_COMPONENT_BASE}.gitVersion=v{KUBERNETES} -X {_COMPONENT_BASE}.gitMajor={_KUBERNETES_MAJOR}"
            f" -X {_COMPONENT_BASE}.gitMinor={_KUBERNETES_MINOR}"
        ),
    ),
    Project(
        "etcd",
        ETCD,
        (Binary("etcd", "go.etcd.io/etcd/server/v3", ("--version",), f"etcd Version: {ETCD.rpartition('.')[0]}."),),
    ),
    Project(
        "containerd",
        CONTAINERD,
        (
            Binary(
                "containerd",
                "github.com/containerd/containerd/v2/cmd/containerd",
                ("--version",),
                f"v{CONTAINERD.rpartition('.')[0]}.",
            ),
            Binary(
                "containerd-shim-runc-v2",
                "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
                ("-v",),
                f"v{CONTAINERD.rpartition('.')[0]}.",
            ),
            Binary(
                "ctr",
                "github.com/containerd/containerd/v2/cmd/ctr",
                ("--version",),
                f"v{CONTAINERD.rpartition('.')[0]}.",
            ),
        ),
        ldflags=f"-s -w -X github.com/containerd/containerd/v2/version.Version=v{CONTAINERD}",
        tags="no_btrfs no_devmapper no_zfs",
        together=True,
    ),
    Project(
        "coredns",
        COREDNS,
        (Binary("coredns", ".", ("-version",), f"CoreDNS-{COREDNS.rpartition('.')[0]}."),),
    ),
    Project("pause", "1", (Binary("pause", "."),)),
    Project(
        "helm",
        HELM,
        (
            Binary(
                "helm",
                "helm.sh/helm/v4/cmd/helm",
                ("version", "--template", "{{.Version}}"),
                f"v{HELM.rpartition('.')[0]}.",
            ),
        ),
        ldflags=f"-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM}",
    ),
    Project(
        "kwok",
        KWOK,
        (Binary("kwok", "sigs.k8s.io/kwok/cmd/kwok", ("--version",), f"v{KWOK.rpartition('.')[0]}."),),
        ldflags=f"-s -w -X sigs.k8s.io/kwok/pkg/consts.Version=v{KWOK}",
    ),
)

CORE_PROJECTS: tuple[str, ...] = ("kubernetes", "etcd", "containerd", "coredns", "pause")
"""What `up` needs; helm and kwok are built when first asked for."""

DEBIAN_PACKAGES: dict[str, str] = {
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
}
"""Executable (a name on PATH or an absolute path) to the Debian package that brings it."""


def project(name: str) -> Project:
    """The project called `name`; KeyError when there is none."""
    return next(p for p in PROJECTS if p.name == name)
