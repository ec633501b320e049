"""Hit rates of the engine's prefix cache on a request trace: `python -m benchmarks.prefix_cache --trace FILE --capacity F --json`.

`hit_rate` is the share of a trace's blocks that are found, with memory for the share F of its distinct blocks: of the engine's cache, LRU,
S3-FIFO, the optimum, which knows the future, and a cache without a bound. `gap_closed_percent` is how far the engine gets from LRU to the
optimum. `tiered_hit_rate` is that of the engine's cache with 2 % of the distinct blocks on the device, 10 % on the host and the rest on
disk, whatever F is. The engine's side is the engine's own code (`KVCacheManager`) from admission to the end of each request; only the
bytes of KV are left out. Its requests hold their blocks while they run, so its capacity is, if anything, smaller than the others'.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replacement import belady_hits, infinite_hits, lru_hits, s3fifo_hits
from benchmarks.traces import TraceError, TraceRequest, die, read_trace
from npufleet_pod.engine.memory.layout import MIN_BLOCK_TOKENS, CacheLayout
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.memory.tiers import DiskTier, HostTier, InlineWorker

DEVICE_SHARE = 0.02
HOST_SHARE = 0.10


@dataclass(slots=True)
class _TraceClock:
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


class _NamesOnly:
    """A disk that keeps no content."""

    def write(self, digest: bytes, data: memoryview) -> None:
        pass

    def read(self, digest: bytes, into: memoryview) -> None:
        pass

    def delete(self, digest: bytes) -> None:
        pass


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_cache", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="a request trace in Mooncake's format")
    parser.add_argument("--capacity", type=float, default=0.05, help="memory as a share of the distinct blocks (default: 0.05)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    if not 0 < arguments.capacity <= 1:
        parser.error(f"--capacity: {arguments.capacity} is no share: give a number over 0 up to 1")
    try:
        requests = read_trace(arguments.trace)
    except TraceError as error:
        die(error)
    result = measure(requests, arguments.capacity)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, rate in result["hit_rate"].items():
        print(f"{name:10} {100 * rate:6.2f} %")
    print(f"of the gap between LRU and the optimum closed: {result['gap_closed_percent']:.1f} %")
    print(f"with tiers {100 * result['tiered_hit_rate']:6.2f} %")


def measure(requests: Sequence[TraceRequest], capacity_share: float) -> dict[str, Any]:
    """All figures of one trace at one capacity."""
    blocks = [block for request in requests for block in request.hash_ids]
    distinct = len(set(blocks))
    capacity = max(1, int(distinct * capacity_share))
    started = time.perf_counter()
    hits = {"npufleet": engine_hits(requests, capacity)}
    engine_seconds = time.perf_counter() - started
    hits |= {
        "lru": lru_hits(blocks, capacity),
        "s3fifo": s3fifo_hits(blocks, capacity),
        "belady": belady_hits(blocks, capacity),
        "infinite": infinite_hits(blocks),
    }
    gap = hits["belady"] - hits["lru"]
    device, host = max(1, int(distinct * DEVICE_SHARE)), max(1, int(distinct * HOST_SHARE))
    tiered = engine_hits(requests, device, host, max(1, distinct - device - host))
    return {
        "requests": len(requests),
        "blocks": len(blocks),
        "distinct_blocks": distinct,
        "capacity_blocks": capacity,
        "hit_rate": {name: count / len(blocks) for name, count in hits.items()},
        "gap_closed_percent": 100 * (hits["npufleet"] - hits["lru"]) / gap if gap else None,
        "tiered_hit_rate": tiered / len(blocks),
        "tiered_share_of_possible_percent": 100 * tiered / hits["infinite"] if hits["infinite"] else None,
        "engine_microseconds_per_block": 1e6 * engine_seconds / len(blocks),
    }


def engine_hits(requests: Sequence[TraceRequest], device_pages: int, host_pages: int = 0, disk_pages: int = 0) -> int:
    """Blocks that the engine's cache finds when the requests come one after the other at their times.

    A block of the trace stands for one page. The part of a prompt that is longer than the device is not computed, nor looked for.
    """
    clock = _TraceClock()
    size = MIN_BLOCK_TOKENS
    host = HostTier(host_pages, 1) if host_pages else None
    disk = DiskTier(_NamesOnly(), InlineWorker(), disk_pages, clock) if disk_pages else None
    manager = KVCacheManager(CacheLayout(size, size, device_pages), clock, host=host, disk=disk)
    names = {block: number for number, block in enumerate({block for request in requests for block in request.hash_ids})}
    hits = 0
    for request in requests:
        ids = request.hash_ids[:device_pages]
        if not ids:
            continue
        clock.seconds = request.timestamp / 1000
        tokens = [names[block] for block in ids for _ in range(size)]
        total = len(tokens)
        # What is cached of a prompt always leaves a token to compute: one more makes each of the trace's blocks findable.
        tokens.append(0)
        manager.prefetch(tokens)
        cached = manager.admit("request", tokens)
        hits += cached // size
        manager.reserve("request", total)
        step = manager.begin_step(["request"])
        manager.commit("request", tokens[cached:total])
        manager.end_step(step)
        manager.free("request")
    return hits


if __name__ == "__main__":
    main()
