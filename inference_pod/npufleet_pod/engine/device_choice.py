"""Opens the device that the settings name, and no other. torch is imported only here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.resources import cpu_count
from npufleet_pod.errors import DeviceError

HCCL_CONNECT_SECONDS = 600
"""Time in which HCCL's ranks find each other; its own 120 s are less than what loading may differ by from rank to rank."""

if TYPE_CHECKING:
    from npufleet_pod.engine.device import Device as ComputeDevice


def open_device(settings: EngineSettings, rank: int = 0) -> ComputeDevice:
    """The device that the settings name, that of `rank` where there are several. Raises DeviceError rather than take another one."""
    # OpenMP reads it when torch loads it. Threads that spin at a barrier take the CPU from the one they wait for: where a pod shares
    # its cores, decoding was 2 to 10 times slower, and on a quiet machine it was no faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    import torch

    from npufleet_pod.engine.device import CpuDevice, StreamDevice

    if settings.device is Device.NPU:
        import torch_npu  # type: ignore[import-not-found, unused-ignore] # noqa: F401 - only in the Ascend image; registers torch.npu

        npu = getattr(torch, "npu", None)
        if npu is None or not npu.is_available() or npu.device_count() < 1:
            raise DeviceError(
                "device: NPU finds no NPU: check that the pod requests one and that the driver is mounted, "
                "or set device CPU for development"
            )
        if npu.device_count() < settings.tensor_parallel:
            raise DeviceError(
                f"tensorParallel: {settings.tensor_parallel} ranks need as many NPUs, the process sees {npu.device_count()}: request "
                "as many, and leave ASCEND_RT_VISIBLE_DEVICES unset, or let it name all that the container holds"
            )
        if settings.tensor_parallel > 1:
            os.environ.setdefault("HCCL_CONNECT_TIMEOUT", str(HCCL_CONNECT_SECONDS))
        return StreamDevice("npu", npu, rank)
    torch.set_num_threads(max(1, (settings.cpu_threads or cpu_count()) // settings.tensor_parallel))
    return CpuDevice()
