"""The addresses of a cluster: one index, two /16 ranges of its own, no clash with what the host routes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from devcluster.errors import AddressInUseError
from devcluster.run import run

ALL_CLUSTERS = IPv4Network("10.128.0.0/10")
MAX_CLUSTERS = 32
_FIRST_SECOND_OCTET = 128  # 10.128.0.0 to 10.191.255.255: rarely used by home, office and Docker networks


@dataclass(frozen=True)
class Network:
    """The address plan of the cluster with this index (0 to 31)."""

    index: int

    @property
    def pods(self) -> IPv4Network:
        """Addresses of pods and of the link to the host."""
        return IPv4Network(f"10.{_FIRST_SECOND_OCTET + 2 * self.index}.0.0/16")

    @property
    def services(self) -> IPv4Network:
        """Cluster addresses of Services."""
        return IPv4Network(f"10.{_FIRST_SECOND_OCTET + 2 * self.index + 1}.0.0/16")

    @property
    def node_pods(self) -> IPv4Network:
        """The part of the pod range that the node hands out: the lower half, the link lives in the upper one."""
        return next(self.pods.subnets(prefixlen_diff=1))

    @property
    def fake_pods(self) -> IPv4Network:
        """Addresses that pods on fake nodes pretend to have."""
        return next(next(reversed(list(self.pods.subnets(prefixlen_diff=1)))).subnets(prefixlen_diff=1))

    @property
    def bridge(self) -> IPv4Address:
        """The bridge's address: the pods' gateway."""
        return self.node_pods[1]

    @property
    def host(self) -> IPv4Address:
        """The host's end of the link."""
        return self.pods[-3]

    @property
    def node(self) -> IPv4Address:
        """The node's address, also the API server's."""
        return self.pods[-2]

    @property
    def link_prefix(self) -> int:
        """Prefix length of the link between host and node."""
        return 30

    @property
    def kubernetes_service(self) -> IPv4Address:
        """Cluster address of `kubernetes.default`."""
        return self.services[1]

    @property
    def dns_service(self) -> IPv4Address:
        """Cluster address of the cluster's DNS."""
        return self.services[10]

    @property
    def host_link(self) -> str:
        """Name of the host's end of the link."""
        return f"devcluster{self.index}"


def overlapping(network: Network, routes: Iterable[tuple[IPv4Network, str]]) -> tuple[IPv4Network, str] | None:
    """The first of `routes` (network, device) that overlaps the cluster's ranges and is not its own link."""
    for route, device in routes:
        if device != network.host_link and (route.overlaps(network.pods) or route.overlaps(network.services)):
            return route, device
    return None


def choose(taken: Iterable[int], routes: Iterable[tuple[IPv4Network, str]]) -> Network:
    """The first free index; raises AddressInUseError naming the last obstacle when all are in use."""
    in_use, known_routes = set(taken), tuple(routes)
    obstacle = f"indices {sorted(in_use)} belong to other clusters"
    for index in range(MAX_CLUSTERS):
        network = Network(index)
        clash = overlapping(network, known_routes)
        if clash is not None:
            obstacle = f"{clash[0]} is routed through {clash[1]}"
        elif index not in in_use and all(device != network.host_link for _, device in known_routes):
            return network
    raise AddressInUseError(f"no free address range in {ALL_CLUSTERS}: {obstacle}; bring another cluster down")


def check_free(network: Network, routes: Iterable[tuple[IPv4Network, str]]) -> None:
    """Raise AddressInUseError when a route of the host overlaps the ranges of a cluster that exists already."""
    clash = overlapping(network, routes)
    if clash is not None:
        raise AddressInUseError(
            f"{network.pods} and {network.services} belong to this cluster, but the host routes {clash[0]} through"
            f" {clash[1]}; remove that route, or run `devcluster down` and `up` again for other addresses"
        )


def parse_routes(routes_json: str) -> tuple[tuple[IPv4Network, str], ...]:
    """Networks and devices out of `ip -json -4 route show table all`; default routes are left out."""
    parsed = []
    for entry in json.loads(routes_json or "[]"):
        destination = entry.get("dst", "default")
        if destination != "default":
            parsed.append((IPv4Network(destination, strict=False), entry.get("dev", "?")))
    return tuple(parsed)


def host_routes() -> tuple[tuple[IPv4Network, str], ...]:
    """What the host routes now."""
    return parse_routes(run(["ip", "-json", "-4", "route", "show", "table", "all"]))
