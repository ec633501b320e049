"""What can be seen to be wrong with a node before the engine starts: driver, firmware, CANN and torch_npu, devices, shared memory.

Versions are read from the files that Huawei's installers leave, since asking the device costs seconds and may hang where they do not fit.
A file that is absent is no refusal: container runtimes differ in what they mount, and the device itself has the last word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.errors import DeviceError

Version = tuple[int, int]

CANN_FOR_TORCH_NPU: Mapping[Version, Version] = {(2, 6): (8, 5), (2, 7): (8, 5), (2, 8): (8, 5), (2, 9): (8, 5), (2, 10): (9, 1)}
"""Least CANN of each torch_npu. 2.6 to 2.9: Ascend/pytorch, docs/zh/release_notes/related_product_version_compatibility_notes.md (7.3.0);
2.10: the released images of vllm-ascend v0.23.0. A later torch_npu needs no older CANN than the last one listed.
"""
DRIVER_FOR_CANN: Mapping[Version, Version] = {(8, 5): (25, 5)}
"""Least driver and firmware (Ascend HDK) of each CANN: hicann/release-management, 8.5.0/release-notes.md."""

DRIVER_FILES = ("usr/local/Ascend/driver/version.info",)
FIRMWARE_FILES = ("usr/local/Ascend/firmware/version.info",)
CANN_FILES = ("latest/*-linux/ascend_toolkit_install.info", "*-linux/ascend_toolkit_install.info", "latest/version.cfg", "version.cfg")
CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
CANN_DEFAULTS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit")
VERSION_LINE = re.compile(r"^\s*\"?(?:[Vv]ersion|(?:runtime|toolkit)_running_version)\"?\s*[=:]\s*\W*(\d+)\.(\d+)", re.MULTILINE)
PACKAGE_LINE = re.compile(r"^\s*package_version\s*=\s*(\d+)\.(\d+)", re.MULTILINE)
"""Firmware numbers its own versions from 1 (7.8 in HDK 25.5); the HDK that it came with is its package_version."""
MIB = 1 << 20
MAX_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Site:
    """Where the node is looked at; tests give it a folder of their own."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    package: Callable[[str], str] = version


def check_node(settings: EngineSettings, site: Site | None = None) -> None:
    """Raises DeviceError with the first thing that cannot work."""
    site = site or Site()
    _shared_memory(settings, site)
    if settings.device is not Device.NPU:
        return
    torch, torch_npu = _package("torch", site), _package("torch_npu", site)
    if torch_npu is None:
        # An image without it is told apart when the model's files are inspected.
        return
    _devices(settings, site)
    if torch and torch != torch_npu:
        raise DeviceError(
            f"torch {_text(torch)} and torch_npu {_text(torch_npu)} do not fit: use an engine image in which both have the same version"
        )
    cann = _found(_cann_files(site))
    needed = _least(CANN_FOR_TORCH_NPU, torch_npu)
    if cann and needed and cann < needed:
        raise DeviceError(
            f"CANN {_text(cann)} is too old for torch_npu {_text(torch_npu)}, which needs {_text(needed)}: use an engine image "
            "that is built on it"
        )
    least = _least(DRIVER_FOR_CANN, cann)
    for name, files, line in (("driver", DRIVER_FILES, VERSION_LINE), ("firmware", FIRMWARE_FILES, PACKAGE_LINE)):
        found = _found([site.root / file for file in files], line)
        if found and least and found < least:
            raise DeviceError(
                f"{name} {_text(found)} of the node is too old for CANN {_text(cann or least)}, which needs {_text(least)}: upgrade it, "
                "or choose an engine image with an older CANN"
            )


def _shared_memory(settings: EngineSettings, site: Site) -> None:
    """Ranks of a replica share the host tier of the KV cache through /dev/shm."""
    shm = site.root / "dev" / "shm"
    if settings.tensor_parallel == 1 or not settings.host_cache_mi or not shm.is_dir():
        return
    room = os.statvfs(shm)
    size_mi = room.f_blocks * room.f_frsize // MIB
    if size_mi < settings.host_cache_mi:
        raise DeviceError(
            f"shared memory has {size_mi} MiB, engine.hostCacheMi asks for {settings.host_cache_mi}: raise podTemplate.shmSizeMi of the "
            "pool, or lower engine.hostCacheMi"
        )


def _devices(settings: EngineSettings, site: Site) -> None:
    devices = [path for path in (site.root / "dev").glob("*davinci*") if re.fullmatch(r"v?davinci\d+", path.name)]
    if len(devices) < settings.tensor_parallel:
        raise DeviceError(
            f"the container sees {len(devices)} NPU device(s) (/dev/davinci*), parallelism.tensor asks for {settings.tensor_parallel}: "
            "check the device plugin, the pool's npus.resourceName and its runtimeClassName"
        )
    unreadable = next((path for path in sorted(devices) if not os.access(path, os.R_OK | os.W_OK)), None)
    if unreadable is not None:
        raise DeviceError(
            f"/dev/{unreadable.name} cannot be opened by user {os.geteuid()}: add the group that owns it on the node, often 1000, to the "
            "pool's podTemplate.supplementalGroups"
        )


def _cann_files(site: Site) -> list[Path]:
    homes = [Path(home) for name in CANN_HOMES if (home := site.environment.get(name))]
    homes += [site.root / default for default in CANN_DEFAULTS]
    return [path for home in homes for pattern in CANN_FILES for path in sorted(home.glob(pattern))]


def _found(files: list[Path], line: re.Pattern[str] = VERSION_LINE) -> Version | None:
    """The version that the first readable file names."""
    for path in files:
        try:
            with path.open("rb") as file:
                match = line.search(file.read(MAX_BYTES).decode(errors="replace"))
        except OSError:
            continue
        if match:
            return int(match[1]), int(match[2])
    return None


def _package(name: str, site: Site) -> Version | None:
    try:
        match = re.match(r"(\d+)\.(\d+)", site.package(name))
    except PackageNotFoundError:
        return None
    return (int(match[1]), int(match[2])) if match else None


def _least(table: Mapping[Version, Version], key: Version | None) -> Version | None:
    """What the last row not above `key` asks for."""
    rows = [row for row in table if key is not None and row <= key]
    return table[max(rows)] if rows else None


def _text(number: Version) -> str:
    return f"{number[0]}.{number[1]}"
