"""A node that cannot serve is refused in one line before the engine starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.errors import DeviceError
from npufleet_pod.preflight import Site, check_node

DRIVER = (
    "Version=25.5.1\nascendhal_version=7.35.23\ntdt_version=1.0\ninnerversion=V100R001C23SPC005B219\ncompatible_version=[V100R001C21]\n"
)
FIRMWARE = "Version=7.8.0.6.201\nfirmware_version=1.0\npackage_version=25.5.1\ncompatible_version_drv=[25.5]\n"
CANN = "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100R001C25SPC001B231\narch=aarch64\nos=linux\n"


def settings(**changes: object) -> EngineSettings:
    """An engine on one NPU."""
    return EngineSettings.model_validate({"modelPath": "/models", "servedName": "tiny", "device": Device.NPU, **changes})


class Node:
    """A folder that looks like an Atlas 800 A2's container."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = {"torch": "2.9.0+cpu", "torch_npu": "2.9.0"}
        self.write("dev/davinci0", "")
        self.write("dev/davinci_manager", "")
        self.write("usr/local/Ascend/driver/version.info", DRIVER)
        self.write("usr/local/Ascend/firmware/version.info", FIRMWARE)
        self.write("usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", CANN)

    def write(self, path: str, text: str) -> None:
        """A file of the node."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def check(self, **changes: object) -> None:
        """What the engine does first."""
        check_node(settings(**changes), Site(self.root, {}, self.version))

    def version(self, name: str) -> str:
        """As importlib.metadata."""
        if name not in self.packages:
            raise PackageNotFoundError(name)
        return self.packages[name]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node on which everything fits."""
    return Node(tmp_path)


def test_a_node_on_which_everything_fits_is_not_refused(node: Node) -> None:
    node.check()


def test_what_is_not_mounted_is_no_refusal(node: Node) -> None:
    (node.root / "usr/local/Ascend/driver/version.info").unlink()
    (node.root / "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info").unlink()
    node.packages.clear()
    node.check()


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        (
            "usr/local/Ascend/driver/version.info",
            "Version=24.1.rc3\n",
            r"driver 24\.1 of the node is too old for CANN 8\.5, which needs 25\.5",
        ),
        (
            "usr/local/Ascend/firmware/version.info",
            FIRMWARE.replace("25.5.1", "25.2.0"),
            r"firmware 25\.2 of the node is too old .*: upgrade it",
        ),
        (
            "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info",
            CANN.replace("8.5.0", "8.2.RC1"),
            r"CANN 8\.2 is too old for torch_npu 2\.9, which needs 8\.5: use an engine image",
        ),
    ],
)
def test_versions_that_do_not_fit_are_named(node: Node, path: str, text: str, words: str) -> None:
    node.write(path, text)
    with pytest.raises(DeviceError, match=words):
        node.check()


def test_a_later_torch_npu_needs_no_older_cann_than_the_last_one_known(node: Node) -> None:
    node.packages = {"torch": "2.13.0", "torch_npu": "2.13.0"}
    with pytest.raises(DeviceError, match=r"CANN 8\.5 is too old for torch_npu 2\.13, which needs 9\.1"):
        node.check()


def test_torch_and_torch_npu_of_two_versions_are_refused(node: Node) -> None:
    node.packages["torch"] = "2.10.0"
    with pytest.raises(DeviceError, match=r"torch 2\.10 and torch_npu 2\.9 do not fit"):
        node.check()


def test_fewer_devices_than_ranks_are_refused(node: Node) -> None:
    with pytest.raises(DeviceError, match=r"sees 1 NPU device.*parallelism\.tensor asks for 2: check the device plugin"):
        node.check(tensorParallel=2)


def test_the_host_cache_of_several_ranks_has_to_fit_shared_memory() -> None:
    with pytest.raises(DeviceError, match=r"shared memory has \d+ MiB, engine\.hostCacheMi asks for 4194304: raise podTemplate\.shmSizeMi"):
        check_node(settings(device=Device.CPU, tensorParallel=2, hostCacheMi=4194304))


def test_a_cpu_needs_no_npu(tmp_path: Path) -> None:
    check_node(settings(device=Device.CPU), Site(tmp_path, {}))
