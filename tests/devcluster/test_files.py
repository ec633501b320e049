"""The configuration files, read back by parsers of their formats."""

from __future__ import annotations

import base64
import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import addons, files
from devcluster.components import Component, HttpProbe, components, node_labels
from devcluster.paths import Layout
from devcluster.settings import ClusterSettings, NpuSettings
from devcluster.versions import CORE_PROJECTS, project

LAYOUT = Layout(Path('/data/with "quotes" and \\ spaces'))
BINARIES = {binary.name: Path("/bin") / binary.name for name in CORE_PROJECTS for binary in project(name).binaries}
SETTINGS = ClusterSettings(name="x", network_index=2, mounts=(Path("/usr"), Path("/srv/x")), binaries=BINARIES)


def test_containerd_gets_valid_toml_whatever_the_data_directory_is_called() -> None:
    parsed = tomllib.loads(files.containerd_toml(LAYOUT, Path("/usr/sbin/runc")))
    assert parsed["root"] == f"{LAYOUT.root}/containerd"
    runtime = parsed["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]["runc"]
    assert runtime["base_runtime_spec"] == f"{LAYOUT.root}/etc/base-spec.json"
    assert runtime["options"]["BinaryName"] == "/usr/sbin/runc"


def test_containers_see_host_folders_only_read_only_and_only_under_one_folder() -> None:
    default = json.dumps({"mounts": [{"destination": "/proc"}], "process": {"rlimits": [{"type": "RLIMIT_NOFILE"}], "cwd": "/"}})
    spec = json.loads(files.base_spec(default, SETTINGS.mounts))
    added = spec["mounts"][1:]
    assert [(mount["source"], mount["destination"]) for mount in added] == [
        ("/usr", "/.devcluster/usr"),
        ("/srv/x", "/.devcluster/srv/x"),
    ]
    assert all("ro" in mount["options"] for mount in added)
    assert "rlimits" not in spec["process"]


def test_links_that_a_volume_hides_are_made_again_in_it_and_other_images_are_let_be(tmp_path: Path) -> None:
    spec = json.loads(files.base_spec('{"mounts": [], "process": {}}', (Path("/usr"), Path("/opt/volume/checkout"))))
    (hook,) = spec["hooks"]["createContainer"]
    root = tmp_path / "rootfs"
    (root / "opt/volume").mkdir(parents=True)
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "bundle": str(tmp_path)}, separators=(",", ":"))

    def run_hook() -> None:
        subprocess.run([hook["path"], *hook["args"][1:]], input=state, text=True, check=True)

    run_hook()
    assert list((root / "opt/volume").iterdir()) == [], "an image with a /usr of its own"
    (root / "usr").symlink_to("/.devcluster/usr")
    for _ in range(2):
        run_hook()
        assert (root / "opt/volume/checkout").readlink() == Path("/.devcluster/opt/volume/checkout")
        assert (root / "usr").readlink() == Path("/.devcluster/usr")


def test_addresses_agree_between_the_files_that_name_them() -> None:
    kubelet = yaml.safe_load(files.kubelet_yaml(SETTINGS, LAYOUT))
    service = next(
        o for o in yaml.safe_load_all(addons.manifests(SETTINGS)) if o["kind"] == "Service" and o["metadata"]["name"] == "kube-dns"
    )
    assert kubelet["clusterDNS"] == [service["spec"]["clusterIP"]] == ["10.133.0.10"]
    plan = json.loads(files.cni_conflist(SETTINGS))["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]
    assert plan == "10.132.0.0/17"
    assert yaml.safe_load(files.kube_proxy_yaml(SETTINGS, LAYOUT))["clusterCIDR"] == "10.132.0.0/16"
    assert "bind 10.132.255.254\n" in files.corefile(SETTINGS, LAYOUT)


def test_a_kubeconfig_holds_everything_it_needs() -> None:
    pem = {"ca.crt": b"CA", "admin.crt": b"CERT", "admin.key": b"KEY"}
    parsed: dict[str, Any] = yaml.safe_load(files.kubeconfig(SETTINGS, "admin", pem))
    assert parsed["clusters"][0]["cluster"] == {
        "server": "https://10.132.255.254:6443",
        "certificate-authority-data": base64.b64encode(b"CA").decode(),
    }
    assert parsed["current-context"] == parsed["contexts"][0]["name"] == "devcluster-x"


def test_the_wrapper_respects_a_kubeconfig_of_the_users_own(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    tool = tmp_path / "tool"
    tool.write_text('#!/bin/sh\necho "$KUBECONFIG|$KUBECACHEDIR|$NO_PROXY|$*"\n')
    tool.chmod(0o755)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(files.wrapper(tool, layout))

    def run(environment: dict[str, str]) -> str:
        return subprocess.run(["/bin/sh", wrapper, "a b", "c"], env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert run({}) == f"{layout.kubeconfig}|{tmp_path}/cache|10.128.0.0/10|a b c"
    assert run({"KUBECONFIG": "/mine", "NO_PROXY": "x"}) == f"/mine|{tmp_path}/cache|x,10.128.0.0/10|a b c"


def test_each_component_comes_after_what_it_waits_for_and_no_secret_is_an_argument() -> None:
    seen: set[str] = set()
    for component in components(SETTINGS, LAYOUT):
        assert set(component.after) <= seen
        assert not any(word in argument.lower() for argument in component.argv for word in ("password", "token=", "begin "))
        seen.add(component.name)
    assert "kwok" not in seen
    with_kwok = SETTINGS.model_copy(update={"binaries": {**BINARIES, "kwok": Path("/bin/kwok")}})
    assert "kwok" in {component.name for component in components(with_kwok, LAYOUT)}


def test_only_loopback_is_asked_without_verifying_the_certificate() -> None:
    def unverified(component: Component) -> bool:
        probe = component.probe
        return isinstance(probe, HttpProbe) and probe.url.startswith("https:") and probe.ca_file is None

    names = {component.name for component in components(SETTINGS, LAYOUT) if unverified(component)}
    assert names == {"kube-controller-manager", "kube-scheduler"}
    assert all("//127.0.0.1:" in c.probe.url for c in components(SETTINGS, LAYOUT) if unverified(c) and isinstance(c.probe, HttpProbe))


@pytest.mark.parametrize("count", [0, 8])
def test_only_a_node_with_cards_has_their_labels(count: int) -> None:
    labels = node_labels(SETTINGS.model_copy(update={"npu": NpuSettings(count=count)}))
    assert labels.get("node.kubernetes.io/npu.chip.name") == ("910B3" if count else None)
