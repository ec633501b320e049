"""Prefix-aware routing on a request trace: `python -m benchmarks.prefix_routing --trace FILE --json`.

Each policy routes the trace to simulated replicas, each with a block cache of its own that forgets what was used least recently. `hit_rate`
is the share of the trace's blocks that the chosen replica holds, `of_shared_percent` that share relative to one cache as large as all
replicas' together (`shared_hit_rate`). `tokens_max_over_mean` is the greatest share of computed tokens (prompt tokens not cached, and
answers) that a replica got, over the mean; `in_flight_max_over_mean` the same of requests in flight, weighted by time and averaged over all
moments at which each replica has, in the mean, at least one. `ttft_ms` comes from the simulated queues.

`npufleet` is the gateway's own code from the bytes of a prompt to the pick (`Prompt.read`, `Balancer`), with `--gateways` gateways that see
a random share each and know of each other only what the replicas' monitors report every five seconds: requests running and waiting, the
size of the KV cache, and the measured speed of prefill. The others see everything. A prompt's bytes are made from the trace's `hash_ids`:
2048 for each block of 512 tokens.

A replica computes prompts one after the other at PREFILL_TOKENS_PER_SECOND and then sends tokens every TPOT_SECONDS, which sets how many
requests overlap. `--speed` runs the trace faster on replicas that compute prompts as much faster: more requests are in flight, the caches
see the same.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.replacement import lru_hits
from benchmarks.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRequest, die, read_trace
from npufleet_gateway.affinity import home, weight
from npufleet_gateway.balancer import BALANCE, Balancer, Lease
from npufleet_gateway.prediction import ReplicaFigures
from npufleet_gateway.prompt import BYTES_PER_TOKEN, Prompt
from npufleet_gateway.routing import Replica, ReplicaState

PREFILL_TOKENS_PER_SECOND = 10_000
TPOT_SECONDS = 0.04
REPORT_SECONDS = 5.0
CAPACITY_SHARE = 0.05
KEY_BYTES = 4096
"""Plain consistent hashing goes by the prompt's first 4 KiB."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the trace, and its prompt as the gateway reads it."""

    at: float
    blocks: list[int]
    output: int
    prompt: Prompt


@dataclass(slots=True)
class SimulatedReplica:
    """One replica's cache and queue."""

    capacity: int
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    computed: int = 0
    prefilled: int = 0
    prefill_seconds: float = 0.0

    def take(self, request: Request) -> int:
        """Blocks of the request that are cached; then all of them are, as far as there is room."""
        hits = 0
        for block in request.blocks:
            if block not in self.cache:
                break
            hits += 1
        for block in reversed(request.blocks[: self.capacity]):
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.capacity:
            self.cache.popitem(last=False)
        return hits


class Policy(Protocol):
    """Picks a replica's number for each request."""

    def pick(self, request: Request, replicas: Sequence[SimulatedReplica]) -> tuple[int, Lease | None]:
        """The number, and what to tell of the request's course."""

    def report(self, now: float, replicas: Sequence[SimulatedReplica]) -> None:
        """The replicas' monitors report."""


class Stateless:
    """A policy that is a function of the request and the replicas."""

    def __init__(self, choose: Callable[[Request, Sequence[SimulatedReplica]], int]) -> None:
        self._choose = choose

    def pick(self, request: Request, replicas: Sequence[SimulatedReplica]) -> tuple[int, Lease | None]:
        """The function's choice."""
        return self._choose(request, replicas), None

    def report(self, now: float, replicas: Sequence[SimulatedReplica]) -> None:
        """Nothing to learn."""


class Npufleet:
    """The gateway's own code, in one or several gateways."""

    def __init__(self, gateways: int, replicas: int, clock: Callable[[], float]) -> None:
        self._random = random.Random(SEED)  # noqa: S311  # no secret: which gateway a connection meets
        self._replicas = [
            Replica("bench", f"r{n}", f"00000000-0000-4000-8000-{n:012d}", "model", frozenset(), "10.0.0.1", ReplicaState.READY)
            for n in range(replicas)
        ]
        self._numbers = {replica.pod_uid: number for number, replica in enumerate(self._replicas)}
        self._balancers = [Balancer(clock, lambda: gateways) for _ in range(gateways)]
        self.seconds = 0.0

    def pick(self, request: Request, replicas: Sequence[SimulatedReplica]) -> tuple[int, Lease | None]:
        """The choice of the gateway that gets the request."""
        balancer = self._random.choice(self._balancers)
        started = time.perf_counter()
        lease = balancer.acquire(self._replicas, (), request.prompt)
        self.seconds += time.perf_counter() - started
        assert lease is not None
        return self._numbers[lease.replica.pod_uid], lease

    def report(self, now: float, replicas: Sequence[SimulatedReplica]) -> None:
        """Every gateway gets every replica's report."""
        for number, replica in enumerate(replicas):
            figures = ReplicaFigures(
                now,
                running=replica.in_flight - replica.waiting,
                waiting=replica.waiting,
                kv_cache_tokens=replica.capacity * MOONCAKE_BLOCK_TOKENS,
                prefill_seconds_per_token=replica.prefill_seconds / replica.prefilled if replica.prefilled else None,
            )
            for balancer in self._balancers:
                balancer.reported(self._replicas[number].pod_uid, figures)


@dataclass(slots=True)
class _Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_routing", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="a request trace in Mooncake's format")
    parser.add_argument("--replicas", type=int, default=8, help="replicas (default: 8)")
    parser.add_argument(
        "--capacity", type=float, default=CAPACITY_SHARE, help=f"all caches together, as a share of the distinct blocks ({CAPACITY_SHARE})"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="how much faster than recorded the requests arrive (default: 1)")
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2, 4], help="numbers of gateways to measure (default: 1 2 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    if arguments.replicas < 1 or min(arguments.gateways) < 1:
        parser.error("--replicas and --gateways: give 1 or more")
    if not 0 < arguments.capacity <= 1:
        parser.error(f"--capacity: {arguments.capacity} is no share: give a number over 0 up to 1")
    if not arguments.speed > 0:
        parser.error(f"--speed: {arguments.speed} is no factor: give a number over 0")
    try:
        trace = read_trace(arguments.trace)
    except TraceError as error:
        die(error)
    result = measure(trace, arguments.replicas, arguments.capacity, arguments.speed, arguments.gateways)
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"one shared cache: {100 * result['shared_hit_rate']:.2f} % of blocks hit")
    for name, row in result["policies"].items():
        print(
            f"{name:24} hits {100 * row['hit_rate']:6.2f} % ({row['of_shared_percent']:5.1f} % of shared)  "
            f"tokens max/mean {row['tokens_max_over_mean']:.2f}  in flight max/mean {row['in_flight_max_over_mean']:.2f}  "
            f"TTFT p50 {row['ttft_ms']['p50']:.0f} p95 {row['ttft_ms']['p95']:.0f} ms"
        )


def measure(trace: Sequence[TraceRequest], replicas: int, capacity_share: float, speed: float, gateways: Sequence[int]) -> dict[str, Any]:
    """All figures of one trace."""
    started = time.perf_counter()
    requests = read_requests(trace, speed)
    reading = time.perf_counter() - started
    blocks = [block for request in requests for block in request.blocks]
    capacity = max(1, int(len(set(blocks)) * capacity_share / replicas))
    shared = shared_hits(requests, capacity * replicas) / len(blocks)
    clock = _Clock()
    policies: dict[str, Policy] = {}
    ours = {count: Npufleet(count, replicas, clock) for count in gateways}
    for count, policy in ours.items():
        policies["npufleet" if count == 1 else f"npufleet_{count}_gateways"] = policy
    policies |= peers(replicas)
    rows = {name: run(policy, requests, replicas, capacity, speed, clock) for name, policy in policies.items()}
    for row in rows.values():
        row["of_shared_percent"] = 100 * row["hit_rate"] / shared if shared else None
    return {
        "requests": len(requests),
        "blocks": len(blocks),
        "distinct_blocks": len(set(blocks)),
        "replicas": replicas,
        "capacity_blocks_per_replica": capacity,
        "speed": speed,
        "shared_hit_rate": shared,
        "shared_block_lru_hit_rate": lru_hits(blocks, capacity * replicas) / len(blocks),
        "policies": rows,
        "microseconds_per_pick": {str(count): 1e6 * policy.seconds / len(requests) for count, policy in ours.items()},
        "microseconds_per_prompt": 1e6 * reading / len(requests),
    }


def read_requests(trace: Sequence[TraceRequest], speed: float) -> list[Request]:
    """The trace's requests with prompts of as many bytes as their tokens are worth."""
    found = []
    for request in trace:
        text = "".join(f"{block:016x}" * (MOONCAKE_BLOCK_TOKENS * BYTES_PER_TOKEN // 16) for block in request.hash_ids)
        text = text[: request.input_length * BYTES_PER_TOKEN] or text
        prompt = Prompt.read("bench/model", prompt=text, body_bytes=len(text))
        found.append(Request(request.timestamp / 1000 / speed, request.hash_ids, request.output_length, prompt))
    return found


def shared_hits(requests: Sequence[Request], capacity: int) -> int:
    """Blocks that one cache of `capacity` blocks finds."""
    cache = SimulatedReplica(capacity)
    return sum(cache.take(request) for request in requests)


def peers(replicas: int) -> dict[str, Policy]:
    """What others do."""
    numbers = [str(n) for n in range(replicas)]
    turn = iter(range(10**12))
    dice = random.Random(SEED)  # noqa: S311  # a simulation

    def key(request: Request) -> int:
        at = [
            name
            for depth, name in enumerate(request.prompt.hashes, start=1)
            if request.prompt.tokens_to(depth) <= KEY_BYTES // BYTES_PER_TOKEN
        ]
        return at[-1] if at else sum(request.blocks)

    def hashed(request: Request, _: Sequence[SimulatedReplica]) -> int:
        return int(home(key(request), numbers) or 0)

    def bounded(request: Request, present: Sequence[SimulatedReplica]) -> int:
        loads = [replica.in_flight for replica in present]
        bound = max(math.ceil(BALANCE * (sum(loads) + 1) / replicas), min(loads) + 1)
        return max((n for n in range(replicas) if loads[n] + 1 <= bound), key=lambda n: weight(key(request), numbers[n]))

    return {
        "round_robin": Stateless(lambda _, __: next(turn) % replicas),
        "random": Stateless(lambda _, __: dice.randrange(replicas)),
        "least_outstanding": Stateless(
            lambda _, present: min(range(replicas), key=lambda n: (present[n].in_flight, next(turn) % replicas))
        ),
        "consistent_hash": Stateless(hashed),
        "consistent_hash_bounded": Stateless(bounded),
    }


def run(policy: Policy, requests: Sequence[Request], count: int, capacity: int, speed: float, clock: _Clock) -> dict[str, Any]:
    """One policy on the whole trace."""
    replicas = [SimulatedReplica(capacity) for _ in range(count)]
    events: list[tuple[float, int, bool, int, Lease | None]] = []
    hits = 0
    ttfts: list[float] = []
    spread_seconds = spread = 0.0
    clock.now = 0.0
    next_report = 0.0

    def advance(until: float) -> None:
        nonlocal spread, spread_seconds
        loads = [replica.in_flight for replica in replicas]
        mean = sum(loads) / count
        if mean >= 1 and until > clock.now:
            spread += (until - clock.now) * max(loads) / mean
            spread_seconds += until - clock.now
        clock.now = until

    for number, request in enumerate(requests):
        while events and events[0][0] <= request.at:
            advance(events[0][0])
            _happen(heapq.heappop(events), replicas)
        advance(request.at)
        if clock.now >= next_report:
            policy.report(clock.now, replicas)
            next_report = clock.now + REPORT_SECONDS
        chosen, lease = policy.pick(request, replicas)
        replica = replicas[chosen]
        found = replica.take(request)
        hits += found
        new = max(0, request.prompt.tokens - found * MOONCAKE_BLOCK_TOKENS)
        replica.computed += new + request.output
        replica.in_flight += 1
        replica.waiting += 1
        seconds = new / (speed * PREFILL_TOKENS_PER_SECOND)
        replica.free_at = max(replica.free_at, request.at) + seconds
        replica.prefilled += new
        replica.prefill_seconds += seconds
        ttfts.append(replica.free_at - request.at)
        heapq.heappush(events, (replica.free_at, 2 * number, False, chosen, lease))
        heapq.heappush(events, (replica.free_at + request.output * TPOT_SECONDS, 2 * number + 1, True, chosen, lease))
    while events:
        clock.now = events[0][0]
        _happen(heapq.heappop(events), replicas)
    ttfts.sort()
    computed = [replica.computed for replica in replicas]
    return {
        "hit_rate": hits / sum(len(request.blocks) for request in requests),
        "tokens_max_over_mean": max(computed) * count / sum(computed),
        "in_flight_max_over_mean": spread / spread_seconds if spread_seconds else None,
        "ttft_ms": {f"p{share}": 1000 * ttfts[min(len(ttfts) - 1, len(ttfts) * share // 100)] for share in (50, 95, 99)},
    }


def _happen(event: tuple[float, int, bool, int, Lease | None], replicas: Sequence[SimulatedReplica]) -> None:
    _, _, ends, chosen, lease = event
    if ends:
        replicas[chosen].in_flight -= 1
        if lease is not None:
            lease.release(1000 * TPOT_SECONDS)
    else:
        replicas[chosen].waiting -= 1
        if lease is not None:
            lease.first_token()


if __name__ == "__main__":
    main()
