"""Sums over the ranks of one host, by route and size: `python -m benchmarks.all_reduce --json`.

Every rank is a process with one compute thread. All routes take turns in one run, so that what else the machine does hits all alike;
medians of rank 0 are given, in microseconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import click
import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # not in torch's list of what it exports

from npufleet_pod.engine.distributed.communication import Route
from npufleet_pod.engine.distributed.shared_exchange import SharedExchange
from npufleet_pod.engine.distributed.wiring import Wiring

KIB = 1024
SIZES_BYTES = (2 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 8192 * KIB)
STORE_SECONDS = 60


@click.command()
@click.option("--ranks", type=click.IntRange(2, 8), multiple=True, default=(2, 4), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(ranks: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """Compare Gloo's ring with shared memory, whole and in segments."""
    result = {str(count): _compare(count, rounds) for count in ranks}
    if as_json:
        print(json.dumps({"microseconds": result}, indent=2))
        return
    for count, by_size in result.items():
        for size, by_route in by_size.items():
            print(f"{count} ranks, {size} bytes: {by_route}")


def _compare(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    wiring = Wiring.create(ranks)
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS))
    numbers = wiring.numbers()
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.all_reduce", "rank", *map(str, (rank, ranks, rounds, store.port, *numbers))],
            pass_fds=[number for number in numbers if number >= 0],
        )
        for rank in range(1, ranks)
    ]
    try:
        return _measure(0, ranks, rounds, store, wiring)
    finally:
        for other in others:
            other.wait(STORE_SECONDS)
        wiring.close()


def _measure(rank: int, ranks: int, rounds: int, store: Store, wiring: Wiring) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=STORE_SECONDS))
    shared = SharedExchange(rank, ranks, wiring, lambda: False)
    routes: dict[str, Callable[[torch.Tensor], object]] = {
        "gloo": distributed.all_reduce,
        "direct": lambda tensor: shared.all_reduce(tensor, Route.DIRECT),
        "segmented": lambda tensor: shared.all_reduce(tensor, Route.SEGMENTED),
    }
    found: dict[str, dict[str, float]] = {}
    for size in SIZES_BYTES:
        seconds: dict[str, list[float]] = {name: [] for name in routes}
        for _ in range(rounds):
            for name, reduce in routes.items():
                tensor = torch.ones(size // 4)
                began = time.perf_counter()
                reduce(tensor)
                seconds[name].append(time.perf_counter() - began)
                assert tensor[-1] == ranks, f"{name}: the sum is wrong"
        found[str(size)] = {name: round(1e6 * statistics.median(times), 1) for name, times in seconds.items()}
    distributed.destroy_process_group()
    return found


def _rank(arguments: list[str]) -> None:
    rank, ranks, rounds, port, *numbers = map(int, arguments)
    store = TCPStore("127.0.0.1", port, ranks, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    _measure(rank, ranks, rounds, store, Wiring.parse(numbers, ranks))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(sys.argv[2:])
    else:
        main()
