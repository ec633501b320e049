"""The policies that npufleet's prefix cache is compared with. Each counts the hits of a sequence of block ids at a capacity in blocks."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence


def lru_hits(blocks: Sequence[int], capacity: int) -> int:
    """Least recently used."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in blocks:
        if block in cache:
            hits += 1
            cache.move_to_end(block)
        else:
            cache[block] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def s3fifo_hits(blocks: Sequence[int], capacity: int) -> int:
    """S3-FIFO (Yang et al., SOSP 2023): a small queue of 10 %, a main queue, a ghost queue as long as the main one, two-bit counters."""
    small_capacity = max(1, capacity // 10)
    main_capacity = max(1, capacity - small_capacity)
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: OrderedDict[int, None] = OrderedDict()
    counters: dict[int, int] = {}
    hits = 0

    def evict_main() -> None:
        while True:
            block = main.popleft()
            if counters[block] == 0:
                del counters[block]
                return
            counters[block] -= 1
            main.append(block)

    def evict_small() -> None:
        while small:
            block = small.popleft()
            if counters[block] > 1:
                counters[block] = 0
                main.append(block)
                if len(main) > main_capacity:
                    evict_main()
                    return
            else:
                del counters[block]
                ghost[block] = None
                if len(ghost) > main_capacity:
                    ghost.popitem(last=False)
                return

    for block in blocks:
        if block in counters:
            hits += 1
            counters[block] = min(counters[block] + 1, 3)
            continue
        while len(counters) >= capacity:
            if len(small) >= small_capacity or not main:
                evict_small()
            else:
                evict_main()
        if block in ghost:
            del ghost[block]
            main.append(block)
        else:
            small.append(block)
        counters[block] = 0
    return hits


def belady_hits(blocks: Sequence[int], capacity: int) -> int:
    """The optimum (Belady 1966), which may also leave out a block that it has just seen: nothing can hit more."""
    never = len(blocks)
    next_use = [never] * len(blocks)
    seen: dict[int, int] = {}
    for index in range(len(blocks) - 1, -1, -1):
        next_use[index] = seen.get(blocks[index], never)
        seen[blocks[index]] = index
    cache: dict[int, int] = {}
    furthest: list[tuple[int, int]] = []
    hits = 0
    for index, block in enumerate(blocks):
        hits += block in cache
        if next_use[index] == never:
            cache.pop(block, None)
            continue
        cache[block] = next_use[index]
        heapq.heappush(furthest, (-next_use[index], block))
        while len(cache) > capacity:
            use, candidate = heapq.heappop(furthest)
            if cache.get(candidate) == -use:
                del cache[candidate]
    return hits


def infinite_hits(blocks: Sequence[int]) -> int:
    """A cache without a bound."""
    return len(blocks) - len(set(blocks))
