"""Names of a prompt's beginnings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_api.prefix import MAX_PREFIX_BYTES, PrefixScope, cuts, prefix_hashes, prompt_bytes

SCOPE = PrefixScope("team-a/chat")
PINNED = ["1efa160049d58bb8"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_cuts_ascend_and_name_any_length_to_within_a_ninth() -> None:
    found = cuts()
    assert len(found) < 48
    assert found[-1] <= MAX_PREFIX_BYTES < found[-1] * 9 / 8 + 1
    assert all(later / earlier <= 9 / 8 for earlier, later in pairwise(found[8:]))


@given(st.integers(0, 3 * 10**5), st.integers(0, 3 * 10**5))
def test_prompts_share_hashes_up_to_the_last_cut_that_they_share_and_none_behind(common: int, more: int) -> None:
    one = b"a" * common + b"b" * more
    other = b"a" * common + b"c" * more
    first, second = prefix_hashes(SCOPE, one), prefix_hashes(SCOPE, other)
    shared = sum(cut <= common for cut in cuts())
    assert len(first) == len(second) == sum(cut <= common + more for cut in cuts())
    assert first[:shared] == second[:shared]
    assert not set(first[shared:]) & set(second[shared:])


@pytest.mark.parametrize(
    "other",
    [PrefixScope("team-b/chat"), PrefixScope("team-a/chat", adapter="sql"), PrefixScope("team-a/chat", salt="sql")],
    ids=["model", "adapter", "salt"],
)
def test_scopes_share_nothing(other: PrefixScope) -> None:
    prompt = b"x" * 4096
    assert not set(prefix_hashes(SCOPE, prompt)) & set(prefix_hashes(other, prompt))
    assert prefix_hashes(PrefixScope("m", adapter="sql"), prompt) != prefix_hashes(PrefixScope("m", salt="sql"), prompt)


def test_the_hashes_are_the_same_in_every_process_and_release() -> None:
    prompt = prompt_bytes([{"role": "system", "content": "You are brief."}, user("x" * 2000)])
    assert [f"{name:016x}" for name in prefix_hashes(SCOPE, prompt)] == PINNED


def test_a_conversation_that_goes_on_begins_with_what_it_was() -> None:
    begun = [user("one" * 1000)]
    longer = [*begun, {"role": "assistant", "content": "two"}, user("three")]
    assert prompt_bytes(longer).startswith(prompt_bytes(begun))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [user("a")]}, {"messages": [{"role": "system", "content": "a"}]}),
        ({"messages": [user("a")]}, {"messages": [user("b")]}),
        ({"messages": [user("a")]}, {"messages": [{**user("a"), "name": "x"}]}),
        ({"messages": [user("a")]}, {"messages": [user("a")], "tools": [{"type": "function"}]}),
        ({"messages": [user([{"type": "text", "text": "a"}])]}, {"messages": [user([{"type": "text", "text": "b"}])]}),
        ({"messages": [user([{"type": "image_url", "image_url": "a"}])]}, {"messages": [user([{"type": "image_url", "image_url": "b"}])]}),
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 23]}),
    ],
)
def test_what_differs_for_the_model_differs_in_bytes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prompt_bytes(**one) != prompt_bytes(**other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"content": "a", "role": "user"}]}),
        ({"messages": [user("a")]}, {"messages": [user([{"type": "text", "text": "a"}])]}),
        ({"prompt": "a"}, {"prompt": ["a", "b"]}),
        ({"prompt": [1, 2]}, {"prompt": [[1, 2], [3]]}),
        ({"prompt": "a", "tools": []}, {"prompt": "a"}),
    ],
    ids=["order of keys", "parts", "batch", "batch of tokens", "no tools"],
)
def test_what_is_the_same_for_the_model_is_the_same_in_bytes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prompt_bytes(**one) == prompt_bytes(**other)


@given(json_values, json_values, json_values)
def test_whatever_a_client_sends_has_bytes(messages: Any, prompt: Any, tools: Any) -> None:
    assert prompt_bytes(messages, prompt, tools) == prompt_bytes(messages, prompt, tools)


def test_no_more_is_taken_than_is_hashed() -> None:
    assert len(prompt_bytes([user("x" * 10**5)] * 100)) < MAX_PREFIX_BYTES + 2 * 10**5
    assert len(prompt_bytes(prompt="é" * 10**7)) <= 2 * MAX_PREFIX_BYTES
    assert len(prompt_bytes(prompt=[12345] * 10**6)) < 3 * MAX_PREFIX_BYTES


def test_half_a_surrogate_is_no_error() -> None:
    assert prompt_bytes(prompt="\ud800") == prompt_bytes(prompt="?")
    assert prefix_hashes(PrefixScope("m", salt="\ud800"), b"x" * 1024)
