"""Writing a cluster's files: certificates, configuration, image archives, command wrappers."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from devcluster import addons, files, images, pki, preflight
from devcluster.paths import Layout
from devcluster.run import run
from devcluster.settings import PAUSE_IMAGE, ClusterSettings

IMAGE_ARCHIVES = ("pause.tar", "host.tar")


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text)


def write_wrapper(layout: Layout, binary: Path) -> Path:
    """A script of the binary's name that runs it against this cluster; returns where it is."""
    layout.bin.mkdir(exist_ok=True)
    wrapper = layout.bin / binary.name
    wrapper.write_text(files.wrapper(binary, layout))
    wrapper.chmod(0o755)
    return wrapper


def write_all(settings: ClusterSettings, layout: Layout, now: datetime.datetime) -> None:
    """Everything the components read. Certificates are made once; the rest follows the settings each time."""
    for folder in (layout.etc / "cni", layout.log, layout.images):
        folder.mkdir(parents=True, exist_ok=True)
    if not pki.complete(layout.pki):
        pki.write_all(layout.pki, pki.identities(settings.network, settings.node_name), now)
    pem = {file.name: file.read_bytes() for file in layout.pki.iterdir()}
    for user in ("controller-manager", "scheduler", "proxy", "coredns", "kwok", "kubelet"):
        write_private(layout.component_kubeconfig(user), files.kubeconfig(settings, user, pem))
    write_private(layout.kubeconfig, files.kubeconfig(settings, "admin", pem))
    default_spec = run([settings.binaries["ctr"], "oci", "spec"])
    texts = {
        "base-spec.json": files.base_spec(default_spec, settings.mounts),
        "containerd.toml": files.containerd_toml(layout, preflight.program("runc")),
        "cni/10-devcluster.conflist": files.cni_conflist(settings),
        "kubelet.yaml": files.kubelet_yaml(settings, layout),
        "kube-proxy.yaml": files.kube_proxy_yaml(settings, layout),
        "Corefile": files.corefile(settings, layout),
        "resolv.conf": "",
        "addons.yaml": addons.manifests(settings),
    }
    for name, text in texts.items():
        (layout.etc / name).write_text(text)
    pause = images.pause_image(PAUSE_IMAGE, settings.binaries["pause"].read_bytes())
    dev = images.dev_image(settings.dev_image, settings.mounts, images.host_root_links(), settings.python_prefix)
    for name, content in zip(IMAGE_ARCHIVES, (pause, dev), strict=True):
        (layout.images / name).write_bytes(content)
    write_wrapper(layout, settings.binaries["kubectl"])
