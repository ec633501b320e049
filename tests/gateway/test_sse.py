"""Counting tokens in streams."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.support import DONE, ROLE, chunk
from npufleet_gateway.sse import MAX_LINE_BYTES, TokenCounter


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def count(*chunks: bytes) -> TokenCounter:
    counter = TokenCounter()
    for number, part in enumerate(chunks):
        counter.feed(part, float(number))
    return counter


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        (ROLE, 0),
        (chunk("a"), 1),
        (chunk("a").replace(b'": "', b'":"'), 1),
        (chunk(""), 0),
        (event(choices=[{"text": "a"}]), 1),
        (event(choices=[{"text": "", "finish_reason": "stop"}]), 0),
        (event(choices=[{"delta": {"content": None, "reasoning_content": "hm"}}]), 1),
        (event(choices=[{"delta": {"tool_calls": [{"function": {"arguments": '{"a"'}}]}}]), 1),
        (event(choices=[{"delta": {}, "finish_reason": "length"}]), 0),
        (event(choices=[], usage={"prompt_tokens": 3, "total_tokens": 3}), 0),
        (event(choices=[{"delta": {"content": '"content":"x" data: [DONE]\ndata:'}}]), 1),
        (event(choices=[{"delta": {"content": ""}, "note": '"content":"x"'}]), 0),
        (DONE, 0),
        (b": ping\n\n", 0),
        (b': data: {"content":"x"}\n\n', 0),
        (b"event: message\nid: 3\n" + chunk("a"), 1),
        (chunk("a").replace(b"\n", b"\r\n"), 1),
        (b"\n\n\n", 0),
    ],
)
def test_an_event_counts_if_it_carries_generated_text(data: bytes, tokens: int) -> None:
    assert count(data).tokens == tokens
    assert count(data + data).tokens == 2 * tokens


def test_the_first_and_the_last_token_set_the_times_whatever_surrounds_them() -> None:
    counter = count(b": ping\n\n", ROLE, chunk("a"), chunk("b"), chunk("c"), event(choices=[{"delta": {}}]), event(choices=[]), DONE)
    assert (counter.first_token_time, counter.last_token_time, counter.tokens) == (2.0, 4.0, 3)
    assert counter.done
    assert not counter.failed


def test_the_engines_own_count_of_tokens_is_believed() -> None:
    counter = count(chunk("several tokens"), chunk("at once"), event(choices=[], usage={"completion_tokens": 7}))
    assert counter.tokens == 7
    assert count(chunk("a"), chunk("b"), event(choices=[], usage={"completion_tokens": 1})).tokens == 2


@pytest.mark.parametrize("error", [event(error={"message": "no"}), event(object="error", message="no"), b'data:{"error":{}}\n\n'])
def test_an_error_event_is_noticed(error: bytes) -> None:
    assert count(chunk("a"), error).failed
    assert count(error + DONE).failed


def test_text_about_errors_is_no_error() -> None:
    assert not count(chunk('{"error": 1}'), event(choices=[{"delta": {"error": "no"}}])).failed


def test_an_endless_line_is_bounded_and_counts_once_for_each_bound() -> None:
    counter = TokenCounter()
    start = b'data: {"choices":[{"delta":{"content":"'
    counter.feed(start, 0)
    for _ in range(100):
        counter.feed(b"x" * 4096, 1)
        assert len(counter._tail) <= MAX_LINE_BYTES + 4096
    assert counter.tokens == 1


USAGE = event(usage={"completion_tokens": 2})
FORGED = chunk('"content":"x"')
EVENTS = st.lists(
    st.sampled_from(
        [ROLE, chunk("a"), chunk("data:"), FORGED, chunk(""), DONE, b": ping\n\n", b': "content":"x"\n\n', event(error={}), USAGE]
    ),
    max_size=12,
)


@given(EVENTS, st.data())
def test_how_the_bytes_are_cut_does_not_matter(events: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    parts = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    expected = count(*events)
    found = count(*parts)
    assert (found.tokens, found.done, found.failed) == (expected.tokens, expected.done, expected.failed)
    assert found.at_boundary


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_are_survived(parts: list[bytes]) -> None:
    counter = count(*parts)
    assert counter.tokens >= 0
    assert counter.at_boundary or not b"".join(parts).endswith(b"\n")
