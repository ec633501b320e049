"""What the gateway remembers of who was sent what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.prefix_index import MAX_HOLDERS, SHARED_CHILDREN, PrefixIndex


def depths(index: PrefixIndex, hashes: list[int]) -> dict[str, int]:
    return index.depths(hashes, {}, {})[0]


def test_a_replica_is_known_to_hold_what_it_was_sent_as_far_as_the_prompts_agree() -> None:
    index = PrefixIndex()
    index.add([1, 2, 3], "a", 0)
    index.add([1, 2, 4], "b", 0)
    assert depths(index, [1, 2, 3, 9]) == {"a": 3, "b": 2}
    assert depths(index, [7, 1]) == {}
    assert depths(index, []) == {}


def test_a_prefix_with_many_continuations_is_shared_and_a_long_conversation_is_not() -> None:
    index = PrefixIndex()
    index.add([1, 2, *range(1000, 1020)], "a", 0)
    for n in range(SHARED_CHILDREN - 2):
        index.add([1, 2, 100 + n], "a", 0)
    assert index.depths([1, 2, 100], {}, {})[1] == 0
    index.add([1, 2, 200], "a", 0)
    assert index.depths([1, 2, 1000, 1001], {}, {})[1] == 2


def test_what_a_replicas_cache_cannot_hold_any_more_is_not_counted_on() -> None:
    index = PrefixIndex()
    index.add([1], "a", 100)
    index.add([1, 2], "a", 300)
    assert index.depths([1, 2], {"a": 1300}, {"a": 1000})[0] == {"a": 2}
    assert index.depths([1, 2], {"a": 1301}, {"a": 1000})[0] == {}
    assert index.depths([1, 2], {"a": 10**9}, {})[0] == {"a": 2}


def test_the_longest_unused_leaves_first_and_never_before_its_continuations() -> None:
    index = PrefixIndex(max_prefixes=4)
    index.add([1, 2], "a", 0)
    index.add([3, 4], "a", 0)
    index.add([1, 2], "a", 0)
    index.add([5], "a", 0)
    assert depths(index, [1, 2]) == {"a": 2}
    assert depths(index, [3, 4]) == {"a": 1}
    assert depths(index, [5]) == {"a": 1}


def test_of_many_holders_the_latest_are_remembered() -> None:
    index = PrefixIndex()
    for n in range(MAX_HOLDERS + 3):
        index.add([1], f"r{n}", 0)
    assert set(depths(index, [1])) == {f"r{n}" for n in range(3, MAX_HOLDERS + 3)}


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=60), st.integers(1, 20))
def test_memory_is_bounded_and_children_are_counted_right(paths: list[list[int]], most: int) -> None:
    index = PrefixIndex(max_prefixes=most)
    for path in paths:
        chained = [hash((depth, *path[: depth + 1])) for depth in range(len(path))]
        index.add(chained, "a", 0)
        assert len(index) <= most
        found = index._prefixes
        for name, prefix in found.items():
            assert prefix.children == sum(child.parent == name for child in found.values())
            assert prefix.parent is None or prefix.parent in found or len(chained) > most
