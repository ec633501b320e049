"""A device plugin on the kubelet's device-plugin API (k8s.io/kubelet, deviceplugin/v1beta1)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import grpc

from devcluster.npu import deviceplugin_pb2 as pb
from devcluster.npu import deviceplugin_pb2_grpc as rpc
from devcluster.npu.state import NpuState, read
from devcluster.settings import NpuSettings

_LOG = logging.getLogger("devcluster.npu")
_API_VERSION = "v1beta1"
_ENDPOINT = "devcluster-npu.sock"
_POLL_SECONDS = 0.5
_REGISTER_SECONDS = 5.0


def device_id(card: int) -> str:
    """The id under which the kubelet knows a card, as Huawei's own plugin names it."""
    return f"Ascend910-{card}"


def card_of(device: str) -> int:
    """The inverse of `device_id`."""
    return int(device.rpartition("-")[2])


def devices(npu: NpuSettings, state: NpuState) -> list[tuple[str, bool]]:
    """(device id, healthy) of every card."""
    return [(device_id(card), card not in state.failed) for card in range(npu.count)]


def preferred(available: Sequence[str], required: Sequence[str], size: int, unit: int) -> list[str]:
    """The cards to give out for a request of `size`: what is required, then whole modules, lowest number first.

    Modules that the required cards already open come first, so that no more modules than needed are broken.
    """
    chosen = list(required)
    rest = sorted(set(map(card_of, available)) - set(map(card_of, required)))
    opened = {card_of(device) // unit for device in required}

    def key(card: int) -> tuple[bool, bool, int]:
        module = card // unit
        whole = all(other in rest for other in range(module * unit, (module + 1) * unit))
        return module not in opened, not whole, card

    chosen += [device_id(card) for card in sorted(rest, key=key)]
    return chosen[:size]


def visible_devices(device_ids: Iterable[str]) -> str:
    """The value of ASCEND_VISIBLE_DEVICES for these cards."""
    return ",".join(str(card) for card in sorted(map(card_of, device_ids)))


class DevicePlugin(rpc.DevicePluginServicer):
    """Serves the cards of one node; `state_file` says which have failed."""

    def __init__(self, npu: NpuSettings, state_file: Path) -> None:
        self._npu = npu
        self._state_file = state_file

    async def GetDevicePluginOptions(  # noqa: N802 -- the name comes from the kubelet's API
        self, request: pb.Empty, context: object
    ) -> pb.DevicePluginOptions:
        """What this plugin can do."""
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def ListAndWatch(  # noqa: N802 -- the name comes from the kubelet's API
        self, request: pb.Empty, context: object
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """The list of cards, again after each change."""
        sent: list[tuple[str, bool]] | None = None
        while True:
            now = devices(self._npu, read(self._state_file))
            if now != sent:
                sent = now
                _LOG.info("cards: %d of %d healthy", sum(healthy for _, healthy in now), len(now))
                yield pb.ListAndWatchResponse(devices=[pb.Device(ID=name, health="Healthy" if good else "Unhealthy") for name, good in now])
            await asyncio.sleep(_POLL_SECONDS)

    async def GetPreferredAllocation(  # noqa: N802 -- the name comes from the kubelet's API
        self, request: pb.PreferredAllocationRequest, context: object
    ) -> pb.PreferredAllocationResponse:
        """Whole modules first."""
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        wanted.available_deviceIDs,
                        wanted.must_include_deviceIDs,
                        wanted.allocation_size,
                        self._npu.unit,
                    )
                )
                for wanted in request.container_requests
            ]
        )

    async def Allocate(  # noqa: N802 -- the name comes from the kubelet's API
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """What a container gets that was given these cards."""
        for container in request.container_requests:
            count = len(container.devices_ids)
            if count % self._npu.unit:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"{count} cards asked for, but they are given out in modules of {self._npu.unit}",
                )
        return pb.AllocateResponse(
            container_responses=[
                pb.ContainerAllocateResponse(envs={"ASCEND_VISIBLE_DEVICES": visible_devices(container.devices_ids)})
                for container in request.container_requests
            ]
        )


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_ctime_ns
    return None


async def _register(folder: Path, npu: NpuSettings) -> None:
    async with grpc.aio.insecure_channel(f"unix://{folder / 'kubelet.sock'}") as channel:
        kubelet = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]  # generated code carries no types
        await kubelet.Register(
            pb.RegisterRequest(
                version=_API_VERSION,
                endpoint=_ENDPOINT,
                resource_name=npu.resource_name,
                options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
            ),
            timeout=_REGISTER_SECONDS,
        )
    _LOG.info("registered %s with the kubelet", npu.resource_name)


async def serve(folder: Path, npu: NpuSettings, state_file: Path) -> None:
    """Serve the plugin in the kubelet's `folder`; register again whenever the kubelet has restarted. Never returns.

    A starting kubelet deletes every socket in its folder, so the server starts anew as well.
    """
    endpoint, kubelet = folder / _ENDPOINT, folder / "kubelet.sock"
    registered_with: tuple[int, int] | None = None
    server: grpc.aio.Server | None = None
    try:
        while True:
            current = _identity(kubelet)
            if current is not None and (current != registered_with or not endpoint.exists()):
                if server is not None:
                    await server.stop(grace=None)
                endpoint.unlink(missing_ok=True)
                server = await _start(DevicePlugin(npu, state_file), endpoint)
                try:
                    await _register(folder, npu)
                    registered_with = current
                except grpc.aio.AioRpcError as error:
                    _LOG.warning("the kubelet does not take the registration yet: %s", error.details())
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        if server is not None:
            await server.stop(grace=None)


async def _start(plugin: DevicePlugin, endpoint: Path) -> grpc.aio.Server:
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(plugin, server)  # type: ignore[no-untyped-call]  # generated code carries no types
    server.add_insecure_port(f"unix://{endpoint}")
    await server.start()
    return server
