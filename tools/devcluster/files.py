"""The configuration files of the components, rendered from the settings (pure)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from devcluster.network import ALL_CLUSTERS
from devcluster.paths import Layout
from devcluster.settings import PAUSE_IMAGE, ClusterSettings

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
KUBELET_ROOT = "/var/lib/kubelet"  # the device-plugin socket's folder below it is a constant of the kubelet
HOST_MOUNT_ROOT = "/.devcluster"
CNI_PLUGINS = "/usr/lib/cni"


_LINK_AGAIN = f"""\
root=$(sed -n 's/.*"bundle":"\\([^"]*\\)".*/\\1/p')/rootfs
[ -L "$root/usr" ] || exit 0
for path do
  [ -L "$root$path" ] || [ -e "$root$path" ] || {{ mkdir -p "$(dirname "$root$path")" && ln -s "{HOST_MOUNT_ROOT}$path" "$root$path"; }}
done
"""
"""A volume may hide links of the development image, as one at /tmp hides those to a checkout below it: they are made again in it."""


def _quoted(value: str | Path) -> str:
    # JSON's string syntax is a subset of TOML's basic strings.
    return json.dumps(str(value))


def containerd_toml(layout: Layout, runc: Path) -> str:
    """containerd's configuration. The runtime socket and state live in the cluster's private /run."""
    return f"""\
version = 3
root = {_quoted(layout.root / "containerd")}
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp", "io.containerd.nri.v1.nri"]

[plugins.'io.containerd.internal.v1.opt']
  path = {_quoted(layout.root / "opt")}

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"

[plugins.'io.containerd.cri.v1.runtime']
  enable_selinux = false
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = {_quoted(layout.etc / "base-spec.json")}
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = {_quoted(runc)}
        SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = {_quoted(layout.etc / "cni")}
"""


def base_spec(default_spec: str, mounts: tuple[Path, ...]) -> str:
    """containerd's default OCI spec (JSON) plus a read-only bind mount of each host path under `/.devcluster`.

    Images that are not the development image never look there, so one runtime serves both kinds.
    """
    spec: dict[str, Any] = json.loads(default_spec)
    for path in mounts:
        spec["mounts"].append(
            {
                "destination": f"{HOST_MOUNT_ROOT}{path}",
                "type": "bind",
                "source": str(path),
                "options": ["rbind", "ro", "nosuid", "nodev"],
            }
        )
    hooks = spec.setdefault("hooks", {})
    hooks["createContainer"] = [{"path": "/bin/sh", "args": ["sh", "-c", _LINK_AGAIN, "sh", *map(str, mounts)]}]
    # The default raises no limit, but setting any needs CAP_SYS_RESOURCE, which build machines often lack.
    spec["process"].pop("rlimits", None)
    return json.dumps(spec, indent=1)


def cni_conflist(settings: ClusterSettings) -> str:
    """The pod network: one bridge, addresses handed out from the node's range."""
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "devcluster",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipMasq": False,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni",
                        "ranges": [[{"subnet": str(settings.network.node_pods)}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        },
        indent=1,
    )


def kubelet_yaml(settings: ClusterSettings, layout: Layout) -> str:
    """The kubelet's configuration.

    Pods get plain cgroups without the QoS tree, which needs controllers that many machines do not offer.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": str(settings.network.node),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "clusterDNS": [str(settings.network.dns_service)],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "healthzBindAddress": "127.0.0.1",
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "resolvConf": str(layout.etc / "resolv.conf"),
            "serializeImagePulls": False,
            "tlsCertFile": str(layout.pki / "kubelet-server.crt"),
            "tlsPrivateKeyFile": str(layout.pki / "kubelet-server.key"),
            "volumePluginDir": str(layout.root / "volume-plugins"),
        }
    )


def kube_proxy_yaml(settings: ClusterSettings, layout: Layout) -> str:
    """kube-proxy's configuration: iptables mode, no host-wide conntrack settings."""
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(layout.component_kubeconfig("proxy"))},
            "clusterCIDR": str(settings.network.pods),
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": "127.0.0.1:10256",
            "hostnameOverride": settings.node_name,
            "metricsBindAddress": "127.0.0.1:10249",
            "mode": "iptables",
        }
    )


def corefile(settings: ClusterSettings, layout: Layout) -> str:
    """CoreDNS: the cluster's names; anything else does not exist, as pods have no way out of the machine."""
    return f"""\
.:53 {{
    bind {settings.network.node}
    errors
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {layout.component_kubeconfig("coredns")}
        pods insecure
        ttl 5
    }}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
    cache 5
    loadbalance
}}
"""


def kubeconfig(settings: ClusterSettings, user: str, pki_files: Mapping[str, bytes]) -> str:
    """A kubeconfig with everything inside. `pki_files` has `ca.crt`, `<user>.crt` and `<user>.key` as PEM."""

    def data(file: str) -> str:
        return base64.b64encode(pki_files[file]).decode()

    name = f"devcluster-{settings.name}"
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": name,
                    "cluster": {"server": settings.server, "certificate-authority-data": data("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")},
                }
            ],
            "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
            "current-context": name,
        }
    )


def wrapper(binary: Path, layout: Layout) -> str:
    """A shell script that runs `binary` against this cluster, with a discovery cache of its own.

    kubectl caches what an API server offers by host and port; a later cluster at the same address must not see it.
    """
    return f"""\
#!/bin/sh
export KUBECONFIG="${{KUBECONFIG:-{layout.kubeconfig}}}"
export KUBECACHEDIR="{layout.root / "cache"}"
export NO_PROXY="${{NO_PROXY:+$NO_PROXY,}}{ALL_CLUSTERS}"
exec "{binary}" "$@"
"""
