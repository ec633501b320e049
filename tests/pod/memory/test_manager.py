"""What the scheduler is promised, case by case."""

from __future__ import annotations

import pytest

from npufleet_pod.engine.memory.errors import MemoryStateError
from npufleet_pod.engine.memory.layout import NO_SCOPE, CacheLayout, CacheScope, Copy, PrefixMatch, Room
from npufleet_pod.engine.memory.manager import KVCacheManager

PROMPT = list(range(100))


def new_manager(pages: int = 16, *, page_tokens: int = 16, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(CacheLayout(16, page_tokens, pages), lambda: 0.0, prefix_caching=prefix_caching)


def serve(manager: KVCacheManager, prompt: list[int], scope: CacheScope = NO_SCOPE, name: str = "first") -> int:
    """Compute a prompt and forget its request; tokens that were cached."""
    cached = manager.admit(name, prompt, scope)
    assert manager.reserve(name, len(prompt)) is Room.READY
    step = manager.begin_step([name])
    manager.commit(name, prompt[cached:])
    manager.end_step(step)
    manager.free(name)
    return cached


def test_a_prompt_is_found_again_but_for_its_last_token() -> None:
    manager = new_manager()
    assert serve(manager, PROMPT[:96]) == 0
    assert serve(manager, PROMPT[:96]) == 80, "the page of the last token is computed"
    assert serve(manager, PROMPT[:97]) == 96
    assert manager.match([*PROMPT[:40], 0, 0, 0]) == PrefixMatch(32, 0, 0)
    manager.check_integrity()


def test_answers_are_found_as_part_of_the_next_turn() -> None:
    manager = new_manager()
    manager.admit("turn", PROMPT[:20])
    manager.reserve("turn", 20)
    manager.commit("turn", PROMPT[:20])
    for token in PROMPT[20:50]:
        manager.reserve("turn", manager.written_tokens("turn") + 1)
        manager.commit("turn", [token])
    manager.free("turn")
    assert manager.match(PROMPT).tokens == 48


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CacheScope(adapter="a"), CacheScope(salt="a")),
        (CacheScope(adapter="a"), CacheScope()),
        (CacheScope(salt="a"), CacheScope(salt="b")),
        (CacheScope("a", "bc"), CacheScope("ab", "c")),
        (CacheScope("1:asalt:1:", ""), CacheScope("", "1:asalt:1:")),
    ],
)
def test_scopes_never_share(first: CacheScope, second: CacheScope) -> None:
    manager = new_manager()
    serve(manager, PROMPT, first)
    assert manager.match(PROMPT, first).tokens == 96
    assert manager.match(PROMPT, second).tokens == 0
    serve(manager, PROMPT, second)
    assert manager.match(PROMPT, second).tokens == 96, "and neither keeps the other from being cached"


def test_equal_digests_of_other_content_are_a_miss() -> None:
    manager = KVCacheManager(CacheLayout(16, 16, 16), lambda: 0.0, digest=lambda data: b"same")
    serve(manager, PROMPT[:40])
    assert manager.match(PROMPT[50:90]).tokens == 0
    assert serve(manager, PROMPT[50:90]) == 0
    assert manager.match(PROMPT[:40]).tokens == 16, "the first content keeps the digest"
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = new_manager(prefix_caching=False)
    serve(manager, PROMPT)
    assert manager.match(PROMPT).tokens == 0
    assert manager.free_pages == 16


def test_two_that_compute_the_same_at_once_end_up_sharing() -> None:
    manager = new_manager()
    for name in ("a", "b"):
        manager.admit(name, PROMPT[:64])
        manager.reserve(name, 64)
    for name in ("a", "b"):
        manager.commit(name, PROMPT[:64])
    assert manager.table("a").pages == manager.table("b").pages
    assert manager.usage == 4 / 16
    manager.check_integrity()


def test_a_request_that_is_preempted_and_comes_back_keeps_its_prefix() -> None:
    manager = new_manager(pages=8)
    manager.admit("old", PROMPT)
    assert manager.reserve("old", 100) is Room.READY
    manager.commit("old", PROMPT[:90])
    manager.free("old")
    assert manager.free_pages == 8
    assert manager.admit("old", PROMPT) == 80


def test_what_does_not_fit_takes_nothing() -> None:
    manager = new_manager(pages=4)
    manager.admit("small", PROMPT[:20])
    assert manager.reserve("small", 20) is Room.READY
    manager.admit("large", [7] * 60)
    assert manager.reserve("large", 60) is Room.NONE
    assert manager.table("large").pages == []
    manager.free("small")
    assert manager.reserve("large", 60) is Room.READY


def test_pages_of_a_step_in_flight_are_fenced_and_said_to_be() -> None:
    """Freed while its step is in flight, a request still writes: its pages go to nobody yet, and nobody is preempted for them."""
    manager = new_manager(pages=4)
    manager.admit("leaving", PROMPT[:50])
    manager.reserve("leaving", 50)
    step = manager.begin_step(["leaving"])
    manager.free("leaving")
    assert (manager.free_pages, manager.fenced_pages) == (0, 4)
    manager.admit("next", [7] * 30)
    assert manager.reserve("next", 30) is Room.AFTER_STEP
    manager.commit("leaving", PROMPT[:50])
    manager.end_step(step)
    assert (manager.free_pages, manager.fenced_pages) == (4, 0)
    assert manager.reserve("next", 30) is Room.READY


def test_a_fence_lasts_until_the_last_step_that_uses_the_page() -> None:
    manager = new_manager(pages=4)
    manager.admit("leaving", PROMPT[:50])
    manager.reserve("leaving", 50)
    first = manager.begin_step(["leaving"])
    second = manager.begin_step(["leaving"])
    third = manager.begin_step([])
    manager.free("leaving")
    manager.end_step(first)
    assert manager.free_pages == 0
    manager.end_step(second)
    assert manager.free_pages == 4
    manager.end_step(third)
    manager.check_integrity()


def test_steps_end_in_their_order() -> None:
    manager = new_manager()
    first, second = manager.begin_step([]), manager.begin_step([])
    with pytest.raises(MemoryStateError, match=f"in flight are \\[{first}, {second}\\]"):
        manager.end_step(second)


def test_forks_share_until_one_goes_on() -> None:
    manager = new_manager()
    manager.admit("a", PROMPT[:40])
    manager.reserve("a", 40)
    manager.commit("a", PROMPT[:40])
    manager.fork("a", "b")
    assert manager.table("a").pages == manager.table("b").pages
    assert manager.reserve("b", 41) is Room.READY
    shared, own = manager.table("a").pages, manager.table("b").pages
    assert shared[:2] == own[:2]
    assert shared[2] != own[2]
    step = manager.begin_step(["a", "b"])
    assert manager.take_transfers() == (Copy(shared[2], own[2], 16),)
    manager.end_step(step)
    assert manager.reserve("a", 41) is Room.READY
    assert manager.table("a").pages == shared, "nobody shares it any more"


def test_blocks_within_a_page_are_copied_rather_than_computed() -> None:
    manager = new_manager(page_tokens=64)
    serve(manager, PROMPT[:64])
    assert manager.admit("next", [*PROMPT[:40], *[7] * 40]) == 32
    step = manager.begin_step(["next"])
    (copied,) = manager.take_transfers()
    assert copied == Copy(0, manager.table("next").pages[0], 32)
    manager.end_step(step)
    manager.check_integrity()


def test_an_admission_that_is_undone_is_not_counted() -> None:
    manager = new_manager()
    serve(manager, PROMPT)
    before = (manager.stats.queried_tokens, manager.stats.hit_tokens)
    for _ in range(5):
        manager.admit("waiting", PROMPT)
        manager.free("waiting")
    assert (manager.stats.queried_tokens, manager.stats.hit_tokens) == before
    serve(manager, PROMPT)
    assert (manager.stats.queried_tokens, manager.stats.hit_tokens) == (200, 96)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda manager: manager.admit("held", PROMPT), "held is admitted already"),
        (lambda manager: manager.fork("held", "held"), "held is admitted already"),
        (lambda manager: manager.reserve("unknown", 1), "unknown holds no memory: admit it first"),
        (lambda manager: manager.table("unknown"), "unknown holds no memory"),
        (lambda manager: manager.begin_step(["unknown"]), "unknown holds no memory"),
        (lambda manager: manager.commit("held", PROMPT), "holds pages for 16: reserve first"),
        (lambda manager: manager.take_transfers(), "no step is in flight"),
    ],
)
def test_misuse_is_told(misuse: object, message: str) -> None:
    manager = new_manager()
    manager.admit("held", PROMPT[:10])
    manager.reserve("held", 10)
    assert callable(misuse)
    with pytest.raises(MemoryStateError, match=message):
        misuse(manager)


def test_a_leak_is_found() -> None:
    manager = new_manager()
    manager.admit("held", PROMPT[:40])
    manager.reserve("held", 40)
    manager.table("held").pages.pop()
    with pytest.raises(MemoryStateError, match="held 0 times and counted 1 times"):
        manager.check_integrity()
