"""KV memory that is reserved and holds no token.

The share is averaged over the time of a replayed trace: of the engine's own bookkeeping (`KVCacheManager`, driven step by step: admission,
chunked prefill, a token per step, end), and of a contiguous cache per request, which reserves prompt and longest answer when a request
starts. A token in pages that several requests share counts once, as does its page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_any_trace
from npufleet_pod.engine.memory.layout import CacheLayout, Room
from npufleet_pod.engine.memory.manager import KVCacheManager

STEP_SECONDS = 0.05
"""Time of a step, and so of a token: it sets how many requests overlap."""
PREFILL_TOKENS_PER_STEP = 8192
MAX_RUNNING = 128
"""Both are the chat profile's."""
DEVICE_TOKENS = 2_000_000


@dataclass(slots=True)
class _Running:
    name: str
    tokens: list[int]
    prompt_tokens: int
    total_tokens: int
    written: int


@dataclass(frozen=True, slots=True)
class Waste:
    """Token places, summed over the steps of a replay."""

    reserved: int = 0
    live: int = 0

    @property
    def percent(self) -> float:
        """Share of the reserved places without a live token."""
        return 100 * (1 - self.live / self.reserved) if self.reserved else 0.0


def measure_fragmentation(paths: Sequence[Path], requests: int, block_tokens: int, page_tokens: int) -> dict[str, Any]:
    """Percent of the reserved places without a live token, over all traces and by trace. Raises TraceError."""
    layout = CacheLayout(block_tokens, page_tokens, DEVICE_TOKENS // page_tokens)
    paged, contiguous = Waste(), Waste()
    traces: dict[str, dict[str, float]] = {}
    for path in paths:
        one_paged, one_contiguous = replay(read_any_trace(path)[:requests], layout)
        traces[path.name] = {"npufleet": one_paged.percent, "contiguous": one_contiguous.percent}
        paged = Waste(paged.reserved + one_paged.reserved, paged.live + one_paged.live)
        contiguous = Waste(contiguous.reserved + one_contiguous.reserved, contiguous.live + one_contiguous.live)
    return {
        "block_tokens": layout.block_tokens,
        "page_tokens": layout.page_tokens,
        "fragmentation_percent": {"npufleet": paged.percent, "contiguous": contiguous.percent},
        "fragmentation_percent_by_trace": traces,
    }


def replay(requests: Sequence[TraceRequest], layout: CacheLayout) -> tuple[Waste, Waste]:
    """Waste of the engine's pages and of a contiguous cache over the same steps."""
    now = [requests[0].timestamp / 1000]
    manager = KVCacheManager(layout, lambda: now[0])
    longest_answer = max(request.output_length for request in requests)
    waiting = deque(enumerate(requests))
    running: list[_Running] = []
    paged, contiguous = [0, 0], [0, 0]
    while waiting or running:
        if not running:
            now[0] = max(now[0], waiting[0][1].timestamp / 1000)
        while waiting and waiting[0][1].timestamp / 1000 <= now[0] and len(running) < MAX_RUNNING:
            running.append(_admit(manager, *waiting.popleft()))
        _step(manager, running)
        now[0] += STEP_SECONDS
        pages = {page: 0 for request in running for page in manager.table(request.name).pages}
        for request in running:
            for index, page in enumerate(manager.table(request.name).pages):
                pages[page] = max(pages[page], min(layout.page_tokens, request.written - index * layout.page_tokens))
        paged[0] += len(pages) * layout.page_tokens
        paged[1] += sum(pages.values())
        contiguous[0] += sum(request.prompt_tokens + longest_answer for request in running)
        contiguous[1] += sum(request.written for request in running)
        for request in [request for request in running if request.written == request.total_tokens]:
            manager.free(request.name)
            running.remove(request)
    manager.check_integrity()
    return Waste(*paged), Waste(*contiguous)


def _admit(manager: KVCacheManager, number: int, request: TraceRequest) -> _Running:
    tokens = _tokens(number, request)
    total = max(len(tokens) + request.output_length - 1, len(tokens))
    cached = manager.admit(str(number), tokens, expected_tokens=total)
    return _Running(str(number), tokens, len(tokens), total, cached)


def _step(manager: KVCacheManager, running: Sequence[_Running]) -> None:
    """One token of each request that decodes, and as much of the prompts as the budget holds."""
    budget = PREFILL_TOKENS_PER_STEP
    counts: dict[str, int] = {}
    for request in running:
        missing = request.prompt_tokens - request.written
        count = min(missing, budget) if missing > 0 else 1
        if count == 0:
            continue
        if manager.reserve(request.name, request.written + count) is not Room.READY:
            raise SystemExit("the replay needs more KV memory than it was given: replay fewer requests")
        counts[request.name] = count
        budget -= count
    step = manager.begin_step(counts)
    for request in running:
        count = counts.get(request.name, 0)
        if count:
            new = request.tokens[request.written : request.written + count]
            # An answer's tokens are the request's own.
            new += [hash((request.name, position)) & 0x7FFFFFFF for position in range(request.written + len(new), request.written + count)]
            manager.commit(request.name, new)
            request.written += count
    manager.end_step(step)


def _tokens(number: int, request: TraceRequest) -> list[int]:
    """Tokens that are equal where the trace's blocks are."""
    length = max(1, request.input_length)
    if not request.hash_ids:
        return [hash((number, position)) & 0x7FFFFFFF for position in range(length)]
    blocks = request.hash_ids[: -(-length // MOONCAKE_BLOCK_TOKENS)]
    tokens = [hash((block, offset)) & 0x7FFFFFFF for block in blocks for offset in range(MOONCAKE_BLOCK_TOKENS)][:length]
    return tokens + [hash((number, position)) & 0x7FFFFFFF for position in range(len(tokens), length)]
