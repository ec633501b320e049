"""What the engine needs of a device besides operations: memory, and an order between copies and compute.

A CPU computes where the call is made, so its streams and events do nothing. An NPU works behind the caller's back: copies run on one
stream and compute on another, and an event makes one wait for the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from npufleet_pod.engine.allocations import Peak, forget_process_peak, process_peak, record_allocations
from npufleet_pod.engine.resources import available_memory_bytes, cpu_model


class Event(Protocol):
    """A moment on a stream."""

    def wait(self) -> None:
        """Let the present stream go on only after that moment."""
        ...


class Device(Protocol):
    """See the module."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def collective_backend(self) -> str:
        """torch.distributed's name of what connects several of these devices."""
        ...

    @property
    def kind(self) -> str:
        """What the hardware calls itself; equal kinds are equally fast."""
        ...

    def free_memory_bytes(self) -> int:
        """Memory that can still be taken."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was begun is done."""
        ...

    def measure_peak(self, work: Callable[[], object]) -> Peak:
        """Do `work`; the most memory that it took at one moment beyond what was held before."""
        ...

    def copies(self) -> AbstractContextManager[None]:
        """Work inside runs on the stream of copies, beside compute."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor on the device, made on the present stream without waiting for it."""
        ...

    def record(self) -> Event:
        """The present moment of the present stream."""
        ...


class _NoEvent:
    def wait(self) -> None:
        pass


class CpuDevice:
    """The CPU: everything is done when the call returns."""

    torch_device = torch.device("cpu")
    collective_backend = "gloo"

    @property
    def kind(self) -> str:
        """The processor's name."""
        return cpu_model()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def measure_peak(self, work: Callable[[], object]) -> Peak:
        """What torch allocated, and what the process grew by beyond that: libraries take memory of their own."""
        before = forget_process_peak()
        with record_allocations() as allocations:
            work()
            # Before the record is read, which takes memory of its own.
            after = process_peak()
        grown = 0 if before is None or after is None else after - before
        return Peak(allocations.peak_bytes, max(0, grown - allocations.peak_bytes))

    def free_memory_bytes(self) -> int:
        """What host and container leave."""
        return available_memory_bytes()

    def copies(self) -> AbstractContextManager[None]:
        """Nothing to change."""
        return contextlib.nullcontext()

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def record(self) -> Event:
        """Nothing to wait for."""
        return _NoEvent()


class StreamDevice:
    """A device with streams, through a namespace like `torch.npu` (torch_npu gives it the interface of torch.cuda)."""

    def __init__(self, name: str, namespace: Any, index: int = 0, collective_backend: str = "hccl") -> None:
        """index: as the process numbers the devices that it sees."""
        self.torch_device = torch.device(name, index)
        self.collective_backend = collective_backend
        self._namespace = namespace
        namespace.set_device(self.torch_device)
        self._copies = namespace.Stream(device=self.torch_device)

    @property
    def kind(self) -> str:
        """The driver's name of the device, such as Ascend910B3."""
        return str(self._namespace.get_device_name(self.torch_device))

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        self._namespace.synchronize(self.torch_device)

    def measure_peak(self, work: Callable[[], object]) -> Peak:
        """What torch's allocator for the device counts, workspaces of operators included."""
        self.synchronize()
        self._namespace.reset_peak_memory_stats(self.torch_device)
        before = self._namespace.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        return Peak(int(self._namespace.max_memory_allocated(self.torch_device) - before))

    def free_memory_bytes(self) -> int:
        """What the driver reports, once torch has given back what it keeps for later."""
        self._namespace.empty_cache()
        free, _ = self._namespace.mem_get_info(self.torch_device)
        return int(free)

    def copies(self) -> AbstractContextManager[None]:
        """The stream of copies."""
        stream: AbstractContextManager[None] = self._namespace.stream(self._copies)
        return stream

    def to_device(self, tensor: Tensor) -> Tensor:
        """Through pinned memory, so that the copy runs beside compute; torch keeps the pinned tensor until it is done."""
        copy = tensor.pin_memory().to(self.torch_device, non_blocking=True)
        # Compute reads it on another stream: its memory must not be given out again before that.
        copy.record_stream(self._namespace.default_stream(self.torch_device))
        return copy

    def record(self) -> Event:
        """An event on the present stream."""
        event: Event = self._namespace.Event()
        event.record()  # type: ignore[attr-defined] # of the namespace's own class
        return event
