"""Which way a sum over the ranks takes, by how they are connected and how much it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

DIRECT_BYTES = 1024 * 1024
"""Sums up to so many bytes are taken whole by every rank: reading all parts costs no more than meeting twice (benchmarks.all_reduce)."""
ROUTE_ENV = "NPUFLEET_COLLECTIVE"
"""`backend`: exchange through torch.distributed even where ranks share the host's memory; for comparisons, and to find faults."""


class Route(Enum):
    """How a sum is taken."""

    DIRECT = auto()
    """Through shared memory, by every rank for itself: one meeting."""
    SEGMENTED = auto()
    """Through shared memory, each rank one segment for all: two meetings, and the work divided."""
    BACKEND = auto()
    """By torch.distributed: HCCL on NPUs, which chooses ring, mesh or tree itself (HCCL_ALGO); Gloo's ring where it is asked for."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How the ranks are connected. They are on one host, since they are processes of one container."""

    ranks: int
    host_memory: bool
    """Whether what they compute lies in the host's memory, and is to be exchanged through it."""

    @classmethod
    def of(cls, ranks: int, device_type: str, environment: Mapping[str, str]) -> Self:
        """Of ranks on devices of torch's type `device_type`, each of which has inherited `environment`."""
        return cls(ranks, device_type == "cpu" and environment.get(ROUTE_ENV) != "backend")


class CommunicationSelector:
    """Pure: the same size gives the same route on every rank."""

    def __init__(self, topology: Topology, direct_bytes: int = DIRECT_BYTES) -> None:
        self.topology = topology
        self._direct_bytes = direct_bytes

    def choose(self, size_bytes: int) -> Route:
        """The route of a sum of `size_bytes`."""
        if not self.topology.host_memory:
            return Route.BACKEND
        return Route.DIRECT if size_bytes <= self._direct_bytes else Route.SEGMENTED
