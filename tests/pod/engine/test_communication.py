"""Sums over ranks: by every route the same, in the order of the ranks, whatever came before; and no wait for a rank that has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.distributed.communication import DIRECT_BYTES, CommunicationSelector, Route, Topology
from npufleet_pod.engine.distributed.shared_exchange import SLOT_BYTES, SharedExchange
from npufleet_pod.engine.distributed.wiring import Wiring
from npufleet_pod.errors import ExchangeError

SLOT_FLOATS = SLOT_BYTES // 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("device", "environment", "size", "route"),
    [
        ("cpu", {}, 4, Route.DIRECT),
        ("cpu", {}, DIRECT_BYTES, Route.DIRECT),
        ("cpu", {}, DIRECT_BYTES + 1, Route.SEGMENTED),
        ("cpu", {"NPUFLEET_COLLECTIVE": "backend"}, 4, Route.BACKEND),
        ("cpu", {"NPUFLEET_COLLECTIVE": "auto"}, 4, Route.DIRECT),
        ("npu", {}, 4, Route.BACKEND),
        ("npu", {}, 2**30, Route.BACKEND),
    ],
)
def test_the_route_follows_topology_and_size(device: str, environment: dict[str, str], size: int, route: Route) -> None:
    assert CommunicationSelector(Topology.of(4, device, environment)).choose(size) is route


def on_threads(ranks: int, work: Callable[[int, SharedExchange], None], given_up: Callable[[], bool] = lambda: False) -> None:
    """One end of an exchange per thread."""
    wiring = Wiring.create(ranks)
    try:
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(lambda rank: work(rank, SharedExchange(rank, ranks, wiring, given_up)), range(ranks)))
    finally:
        wiring.close()


@settings(max_examples=25)
@given(data=st.data())
def test_sums_and_joins_are_exact_and_in_the_order_of_the_ranks(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 5))
    sizes = st.sampled_from([1, 2, 3, 127, 4096, SLOT_FLOATS - 1, SLOT_FLOATS, SLOT_FLOATS + 1])
    operations = data.draw(
        st.lists(st.tuples(st.sampled_from([Route.DIRECT, Route.SEGMENTED, None]), sizes, st.sampled_from(DTYPES)), min_size=1, max_size=6)
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows = data.draw(st.integers(1, 3))
    inputs = [[torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)] for _, size, dtype in operations]

    def work(rank: int, exchange: SharedExchange) -> None:
        for (route, size, dtype), parts in zip(operations, inputs, strict=True):
            if route is None:
                # Parts of different widths.
                widths = [max(1, size // (other + 1)) for other in range(ranks)]
                joined = [part[:width].view(1, -1).repeat(rows, 1) for part, width in zip(parts, widths, strict=True)]
                own, expected = joined[rank], torch.cat(joined, dim=1)
                assert torch.equal(exchange.gather(own.contiguous(), widths), expected if rank == 0 else own)
                continue
            tensor = parts[rank].clone()
            assert exchange.all_reduce(tensor, route) is tensor
            total = parts[0].to(torch.float32)
            for part in parts[1:]:
                total = total + part.to(torch.float32)
            assert torch.equal(tensor, total.to(dtype))

    on_threads(ranks, work)


def test_a_sum_does_not_depend_on_what_is_added_beside_it() -> None:
    rows = [torch.randn(700, 601, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    alone: dict[int, torch.Tensor] = {}

    def work(rank: int, exchange: SharedExchange) -> None:
        whole = exchange.all_reduce(rows[rank].clone(), Route.SEGMENTED)
        one = exchange.all_reduce(rows[rank][333].clone(), Route.DIRECT)
        assert torch.equal(whole[333], one)
        alone[rank] = one

    on_threads(4, work)
    assert all(torch.equal(alone[0], other) for other in alone.values()), "all ranks go on with the same numbers"


def test_a_rank_that_waits_for_one_that_failed_is_told() -> None:
    failed = threading.Event()

    def work(rank: int, exchange: SharedExchange) -> None:
        if rank == 2:
            failed.set()
            return
        with pytest.raises(ExchangeError, match="a rank has failed"):
            exchange.all_reduce(torch.ones(4), Route.DIRECT)

    on_threads(3, work, failed.is_set)


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    one = Wiring.create(3)
    yield one
    one.close()


def test_wiring_is_the_same_in_another_process(wiring: Wiring) -> None:
    assert Wiring.parse(wiring.numbers(), 3) == wiring
    signals = [number for row in wiring.signals for number in row if number >= 0]
    assert len(set(signals)) == 6, "every pair of ranks has a counter for each direction"
