"""The exchange between ranks through torch.distributed: Gloo over the loopback on CPUs, HCCL on NPUs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # not in torch's list of what it exports

from npufleet_pod.engine.device import Device
from npufleet_pod.engine.distributed.communication import CommunicationSelector, Route, Topology
from npufleet_pod.engine.distributed.progress import Progress
from npufleet_pod.engine.distributed.shared_exchange import SharedExchange
from npufleet_pod.engine.distributed.wiring import Wiring
from npufleet_pod.errors import DeviceError, ExchangeError, one_line

LOOPBACK = "127.0.0.1"
PATIENCE = 10
"""An exchange itself gives up after so many times the ranks' timeout: whoever watches the ranks does so earlier, and knows the culprit."""


def open_store(ranks: int, timeout_seconds: float) -> TCPStore:
    """Where the ranks find each other, on a free port of the loopback, which nobody outside the pod reaches."""
    listener = socket.create_server((LOOPBACK, 0), backlog=ranks)
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )


def join_store(port: int, ranks: int, timeout_seconds: float) -> TCPStore:
    """The store that rank 0 has opened."""
    return TCPStore(LOOPBACK, port, ranks, is_master=False, timeout=timedelta(seconds=timeout_seconds))


class SmartAllReduce:
    """A `models.collective.Collective` that takes each sum by the route that its size and the ranks' topology call for.

    `connect` comes before the first exchange. Every exchange is counted in `progress` as it begins and as it ends.
    """

    def __init__(self, rank: int, size: int, progress: Progress, wiring: Wiring, device: Device) -> None:
        self.size = size
        self._rank = rank
        self._progress = progress
        self._backend = device.collective_backend
        self._device = device.torch_device
        self._selector = CommunicationSelector(Topology.of(size, device.torch_device.type, os.environ))
        self._shared = SharedExchange(rank, size, wiring, progress.given_up) if self._selector.topology.host_memory else None

    @property
    def connected(self) -> bool:
        """Whether exchanges can begin: ranks that share memory are born connected."""
        return self._shared is not None or distributed.is_initialized()

    def connect(self, store: Store, timeout_seconds: float) -> None:
        """Join the others. Raises DeviceError."""
        # Left to itself, Gloo takes the address that the host's name resolves to, which in a pod is open to the cluster.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            distributed.init_process_group(
                self._backend, store=store, rank=self._rank, world_size=self.size, timeout=timedelta(seconds=PATIENCE * timeout_seconds)
            )
        except (RuntimeError, ValueError) as error:
            raise DeviceError(f"{self._backend}: the {self.size} ranks cannot be connected: {error}") from error
        # HCCL connects, and takes its buffers, with the first exchange.
        self.all_reduce(torch.zeros(1, device=self._device))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collective; written over `tensor`. Raises ExchangeError."""
        route = self._selector.choose(tensor.nbytes)
        with self._exchange():
            if self._shared is not None and route is not Route.BACKEND:
                return self._shared.all_reduce(tensor, route)
            distributed.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Collective. Raises ExchangeError."""
        if self._shared is not None:
            with self._exchange():
                return self._shared.gather(tensor, sizes)
        rows, widest = tensor.shape[0], max(sizes)
        padded = tensor if tensor.shape[1] == widest else torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1]))
        parts = [tensor.new_empty((rows, widest)) for _ in range(self.size)]
        with self._exchange():
            # To all, since HCCL knows no other way.
            distributed.all_gather(parts, padded)
        if self._rank > 0:
            return tensor
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        self._progress.advance()
        try:
            yield
        except RuntimeError as error:
            raise ExchangeError(f"exchange between ranks: {one_line(str(error))}") from error
        finally:
            self._progress.advance()

    def close(self) -> None:
        """Leave the others."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
