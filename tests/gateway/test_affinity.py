"""Where keys belong."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.affinity import home, key_of, load_bound

uids = st.lists(st.uuids().map(str), min_size=1, max_size=12, unique=True)


def test_without_pods_there_is_no_home() -> None:
    assert home(1, []) is None


@given(st.integers(0, 2**64 - 1), uids, st.randoms(use_true_random=False))
def test_a_home_does_not_depend_on_the_order_of_the_pods(key: int, pods: list[str], random: object) -> None:
    shuffled = list(pods)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' Random
    assert home(key, shuffled) == home(key, pods)


@given(st.integers(0, 2**64 - 1), uids, st.uuids().map(str))
def test_a_pod_that_comes_takes_keys_and_moves_none_between_the_others(key: int, pods: list[str], newcomer: str) -> None:
    assert home(key, [*pods, newcomer]) in (home(key, pods), newcomer)


def test_keys_spread_evenly() -> None:
    pods = [f"00000000-0000-4000-8000-{n:012d}" for n in range(8)]
    counts = dict.fromkeys(pods, 0)
    for n in range(8000):
        counts[home(key_of("team/model", f"session-{n}"), pods) or ""] += 1
    # A binomial count of mean 1000 has a standard deviation of 30.
    assert all(850 < count < 1150 for count in counts.values())


def test_sessions_are_told_apart_by_model_and_name() -> None:
    assert key_of("a", "bc") != key_of("ab", "c")
    assert key_of("a", "\ud800") == key_of("a", "?")


@given(st.floats(0, 10**6), st.floats(1, 3))
def test_the_bound_leaves_room_above_the_mean(mean: float, balance: float) -> None:
    assert load_bound(mean, balance) == balance * mean + 2 * math.sqrt(mean) >= mean
