"""The device plugin, asked over its real gRPC interface by a kubelet of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devcluster.npu import deviceplugin_pb2 as pb
from devcluster.npu import deviceplugin_pb2_grpc as rpc
from devcluster.npu import plugin, state
from devcluster.settings import NpuSettings


class Registrations(rpc.RegistrationServicer):
    """The kubelet's side of the registration."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()

    async def Register(self, request: pb.RegisterRequest, context: object) -> pb.Empty:  # noqa: N802 -- the kubelet's API
        await self.received.put(request)
        return pb.Empty()


async def kubelet(folder: Path) -> tuple[grpc.aio.Server, Registrations]:
    server, registrations = grpc.aio.server(), Registrations()
    rpc.add_RegistrationServicer_to_server(registrations, server)  # type: ignore[no-untyped-call]  # generated code carries no types
    server.add_insecure_port(f"unix://{folder / 'kubelet.sock'}")
    await server.start()
    return server, registrations


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """A device-plugin folder in which the plugin serves four cards in modules of two."""
    serving = asyncio.create_task(plugin.serve(tmp_path, NpuSettings(count=4, unit=2), tmp_path / "npu.json"))
    yield tmp_path
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def stub(folder: Path) -> tuple[grpc.aio.Channel, rpc.DevicePluginStub]:
    channel = grpc.aio.insecure_channel(f"unix://{folder / 'devcluster-npu.sock'}")
    return channel, rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]  # generated code carries no types


async def test_cards_are_registered_listed_and_listed_again_when_one_fails(folder: Path) -> None:
    server, registrations = await kubelet(folder)
    request = await registrations.received.get()
    assert (request.version, request.resource_name) == ("v1beta1", "huawei.com/Ascend910")
    channel, cards = stub(folder)
    stream = cards.ListAndWatch(pb.Empty())
    first = await stream.read()
    assert [(d.ID, d.health) for d in first.devices] == [(f"Ascend910-{n}", "Healthy") for n in range(4)]
    state.change(folder / "npu.json", lambda now: now.with_failed(2))
    second = await stream.read()
    assert [d.health for d in second.devices] == ["Healthy", "Healthy", "Unhealthy", "Healthy"]
    stream.cancel()
    await channel.close()
    await server.stop(None)


async def test_it_registers_again_with_a_restarted_kubelet(folder: Path) -> None:
    server, registrations = await kubelet(folder)
    await registrations.received.get()
    await server.stop(None)
    for name in ("kubelet.sock", "devcluster-npu.sock"):  # as a starting kubelet does
        (folder / name).unlink(missing_ok=True)
    server, registrations = await kubelet(folder)
    assert (await registrations.received.get()).endpoint == "devcluster-npu.sock"
    await server.stop(None)


async def test_allocation_names_the_cards_and_refuses_a_broken_module(folder: Path) -> None:
    server, registrations = await kubelet(folder)
    await registrations.received.get()
    channel, cards = stub(folder)
    asked = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["Ascend910-3", "Ascend910-2"])])
    answer = await cards.Allocate(asked)
    assert dict(answer.container_responses[0].envs) == {"ASCEND_VISIBLE_DEVICES": "2,3"}
    odd = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=["Ascend910-3"])])
    with pytest.raises(grpc.aio.AioRpcError, match="1 cards asked for, but they are given out in modules of 2"):
        await cards.Allocate(odd)
    options = await cards.GetDevicePluginOptions(pb.Empty())
    assert options.get_preferred_allocation_available
    await channel.close()
    await server.stop(None)


cards = st.sets(st.integers(0, 15))


@given(available=cards, unit=st.sampled_from([1, 2, 4]), data=st.data())
def test_the_preferred_cards_are_available_and_include_what_is_required(available: set[int], unit: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(available)))
    required = data.draw(st.sets(st.sampled_from(sorted(available)), max_size=size) if available and size else st.just(set()))
    chosen = plugin.preferred(list(map(plugin.device_id, available)), list(map(plugin.device_id, required)), size, unit)
    numbers = list(map(plugin.card_of, chosen))
    assert len(numbers) == len(set(numbers)) == size
    assert required <= set(numbers) <= available


@given(st.sets(st.integers(0, 7)), st.integers(1, 4))
def test_whole_modules_are_given_out_where_there_are_enough(whole: set[int], modules: int) -> None:
    available = sorted(card for module in whole for card in (2 * module, 2 * module + 1))
    size = min(2 * modules, len(available))
    numbers = [plugin.card_of(d) for d in plugin.preferred(list(map(plugin.device_id, available)), [], size, 2)]
    assert {card ^ 1 for card in numbers} == set(numbers)


def test_broken_modules_are_left_for_last() -> None:
    available = [plugin.device_id(card) for card in (1, 2, 3, 4)]
    assert plugin.preferred(available, [], 2, 2) == ["Ascend910-2", "Ascend910-3"]
    assert plugin.preferred(available, ["Ascend910-4"], 2, 2)[0] == "Ascend910-4"
    assert plugin.visible_devices(["Ascend910-10", "Ascend910-9"]) == "9,10"
