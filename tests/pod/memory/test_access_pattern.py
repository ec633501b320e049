"""What is replaced: learned from use, and never much worse than recency."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.memory.access_pattern import PredictiveAccessPattern, Tier
from npufleet_pod.engine.memory.guard import RecencyGuard
from npufleet_pod.engine.memory.reuse_model import AGE_EDGES_SECONDS, BINS, ReuseModel

Trace = Sequence[tuple[float, Sequence[int]]]


def chats(seed: int, count: int) -> Iterator[tuple[float, list[int]]]:
    """Half of the prompts are asked once; the others are conversations, which come back after about a minute with two pages more."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    waiting: list[tuple[float, list[int]]] = []
    page = 0
    now = 0.0
    for _ in range(count):
        now += draw.expovariate(1.0)
        due = [item for item in waiting if item[0] <= now]
        for item in due:
            waiting.remove(item)
            pages = [*item[1], page, page + 1]
            page += 2
            yield item[0], pages
            if draw.random() < 0.7:
                waiting.append((now + draw.uniform(30, 90), pages))
        once = draw.random() < 0.5
        size = 12 if once else 4
        pages = list(range(page, page + size))
        page += size
        yield now, pages
        if not once:
            waiting.append((now + draw.uniform(30, 90), pages))


def predicted_hits(trace: Trace, capacity: int) -> int:
    """Hits of a cache that keeps what the pattern says."""
    pattern = PredictiveAccessPattern(capacity)
    resident: set[Hashable] = set()
    hits = 0
    for now, pages in trace:
        found = sum(page in resident for page in pages)
        hits += found
        pattern.use(pages, found, now)
        for page in pages:
            if page not in resident:
                resident.add(page)
                pattern.add(page, Tier.DEVICE)
        while len(resident) > capacity:
            victim = pattern.victim(Tier.DEVICE)
            assert victim in resident
            pattern.remove(victim)
            resident.remove(victim)
        assert pattern.evictable(Tier.DEVICE) == len(resident)
    return hits


def recency_hits(trace: Trace, capacity: int) -> int:
    """Hits of LRU."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _, pages in trace:
        for page in pages:
            hits += page in cache
            cache[page] = None
            cache.move_to_end(page)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [100, 250, 500])
def test_conversations_are_kept_rather_than_what_is_asked_once(capacity: int) -> None:
    trace = list(chats(1, 1500))
    assert predicted_hits(trace, capacity) > 1.2 * recency_hits(trace, capacity)


@pytest.mark.parametrize("capacity", [40, 400])
def test_where_nothing_can_be_predicted_little_is_lost(capacity: int) -> None:
    draw = random.Random(2)  # noqa: S311 - not for secrets
    trace = [(float(index), [10 * draw.randrange(100) + page for page in range(10)]) for index in range(1500)]
    least = recency_hits(trace, capacity) - 0.02 * 15000
    assert predicted_hits(trace, capacity) > least


def test_a_loop_that_is_longer_than_the_cache_still_hits() -> None:
    trace = [(float(index), range(10 * (index % 50), 10 * (index % 50) + 10)) for index in range(1000)]
    assert recency_hits(trace, 250) == 0
    assert predicted_hits(trace, 250) > 2000


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5), st.integers(1, 6)), max_size=40),
    st.integers(1, 12),
)
@settings(deadline=None)
def test_victims_are_evictable_whatever_the_clock_does(uses: list[tuple[float, int, int]], capacity: int) -> None:
    predicted_hits([(now, range(10 * start, 10 * start + count)) for now, start, count in uses], capacity)


def test_each_tier_has_its_own_victims() -> None:
    pattern = PredictiveAccessPattern(10)
    pattern.use([1, 2, 3], 0, 0.0)
    pattern.add(1, Tier.DEVICE)
    pattern.add(2, Tier.HOST)
    assert (pattern.victim(Tier.DEVICE), pattern.victim(Tier.HOST), pattern.victim(Tier.DISK)) == (1, 2, None)
    pattern.add(2, Tier.DISK)
    assert (pattern.victim(Tier.HOST), pattern.victim(Tier.DISK)) == (None, 2)
    pattern.remove(2)
    pattern.remove(2)
    assert pattern.victim(Tier.DISK) is None


def test_the_deepest_page_goes_first() -> None:
    pattern = PredictiveAccessPattern(10)
    pattern.use([1, 2, 3, 4], 0, 0.0)
    for page in (1, 2, 3):
        pattern.add(page, Tier.DEVICE)
    assert pattern.victim(Tier.DEVICE) == 3


def test_what_is_observed_is_bounded() -> None:
    pattern = PredictiveAccessPattern(10, tracked=100)
    for index in range(200):
        pattern.use(range(5 * index, 5 * index + 5), 0, float(index))
    assert len(pattern._pages) <= 110
    pattern.add(0, Tier.DEVICE)
    assert pattern.victim(Tier.DEVICE) == 0, "a page that was forgotten can still be cached"


def test_hazards_are_uses_by_exposure() -> None:
    model = ReuseModel()
    for index in range(1000):
        model.enter((1,), 0, 1.0, float(index))
        model.leave((1,), 0, 1.0, float(index), index + 2.0, used=index % 10 == 0)
    (values,) = model.values(((1,),), 1000.0)
    assert values[0] == pytest.approx(0.05, rel=0.05)


def test_an_unlearned_model_orders_by_recency() -> None:
    (values,) = ReuseModel().values(((),), 0.0)
    assert len(values) == BINS == len(AGE_EDGES_SECONDS)
    assert values == sorted(values, reverse=True)


def test_what_was_learned_fades() -> None:
    model = ReuseModel()
    model.decay(0.0)
    model.enter((), 0, 100.0, 0.0)
    model.leave((), 0, 100.0, 0.0, 1.0, used=True)
    (before,) = model.values(((),), 1.0)
    model.decay(30 * 24 * 3600.0)
    (after,) = model.values(((),), 1.0)
    (unlearned,) = ReuseModel().values(((),), 1.0)
    assert before[0] > after[0] == pytest.approx(unlearned[0], rel=0.01)


def test_prediction_that_loses_is_suspended_for_longer_each_time() -> None:
    guard = RecencyGuard(1000)
    guard.record(range(1000), 0)
    pauses: list[int] = []
    for _ in range(2):
        while guard.trusted:
            guard.record(range(10), 0)
        uses = 0
        while not guard.trusted:
            guard.record(range(10), 10)
            uses += 10
        pauses.append(uses)
    assert pauses == [2000, 4000]
    assert guard.lead < 0
