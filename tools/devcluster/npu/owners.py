"""Which container holds which card, asked of the kubelet (k8s.io/kubelet, podresources/v1), as the real exporter does."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from devcluster.npu import podresources_pb2 as pb
from devcluster.npu import podresources_pb2_grpc as rpc
from devcluster.npu.plugin import card_of

_LOG = logging.getLogger("devcluster.npu")
_ASK_SECONDS = 2.0


@dataclass(frozen=True)
class Owner:
    """A container that was given cards."""

    namespace: str
    pod: str
    container: str


def owners_in(pods: Iterable[pb.PodResources], resource_name: str) -> dict[int, Owner]:
    """Card to owner, out of the kubelet's answer."""
    return {
        card_of(device): Owner(pod.namespace, pod.name, container.name)
        for pod in pods
        for container in pod.containers
        for devices in container.devices
        if devices.resource_name == resource_name
        for device in devices.device_ids
    }


class Kubelet:
    """The kubelet's pod-resources socket; blocking, for the exporter's own threads."""

    def __init__(self, socket: Path, resource_name: str) -> None:
        self._resource_name = resource_name
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        self._stub = rpc.PodResourcesListerStub(self._channel)  # type: ignore[no-untyped-call]  # generated code carries no types

    def owners(self) -> Mapping[int, Owner]:
        """Card to owner now; empty, with a line in the log, while the kubelet does not answer."""
        try:
            answer = self._stub.List(pb.ListPodResourcesRequest(), timeout=_ASK_SECONDS)
        except grpc.RpcError as error:
            _LOG.warning("the kubelet does not say who holds the cards: %s", error)
            return {}
        return owners_in(answer.pod_resources, self._resource_name)

    def close(self) -> None:
        """Give the connection up."""
        self._channel.close()
