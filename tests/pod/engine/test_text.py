from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.engine.text import MAX_HELD_TOKENS, REPLACEMENT, IncrementalDetokenizer, StopStringMatcher
from support.tiny_model import build_tokenizer

TOKENIZER = build_tokenizer()


def detokenizer() -> IncrementalDetokenizer:
    return IncrementalDetokenizer(lambda token_ids: TOKENIZER.decode(token_ids, skip_special_tokens=True))


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("日本語🎉👩‍🚀é́ \n"))))
def test_pieces_add_up_to_the_text_and_no_piece_holds_half_a_character(text: str) -> None:
    stream = detokenizer()
    pieces = [stream.push(token) for token in TOKENIZER.encode(text).ids]
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_a_character_of_four_tokens_comes_with_its_last() -> None:
    stream = detokenizer()
    pieces = [stream.push(token) for token in TOKENIZER.encode("🎉").ids]
    assert pieces == ["", "", "", "🎉"]
    assert stream.flush() == ""


def test_bytes_that_never_become_a_character_are_given_out_after_a_while() -> None:
    stream = detokenizer()
    invalid = TOKENIZER.encode("é").ids[0]
    pieces = [stream.push(invalid) for _ in range(MAX_HELD_TOKENS)]
    assert pieces[:-1] == [""] * (MAX_HELD_TOKENS - 1)
    assert pieces[-1] == REPLACEMENT * MAX_HELD_TOKENS


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    stream = detokenizer()
    tokens = TOKENIZER.encode("a🎉").ids
    assert [stream.push(token) for token in tokens[:-1]] == ["a", "", "", ""]
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


@pytest.mark.parametrize("stop", ["stop", "s", "STOP!", "aab", "日本"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_is_found_wherever_the_pieces_break(stop: str, size: int) -> None:
    text = f"some text aa{stop} and more"
    expected = text[: text.index(stop)]
    for include in (False, True):
        matcher = StopStringMatcher([stop], include)
        sent = ""
        for start in range(0, len(text), size):
            piece, matched = matcher.push(text[start : start + size])
            sent += piece
            assert not (matched is None and stop in sent), "part of a stop string was sent"
            if matched is not None:
                break
        assert matched == stop
        assert sent == expected + (stop if include else "")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 4))
def test_what_is_sent_is_always_the_text_before_the_first_completed_stop_string(text: str, stops: list[str], size: int) -> None:
    matcher, sent, rest, matched = StopStringMatcher(stops), "", text, None
    while rest and matched is None:
        piece, matched = matcher.push(rest[:size])
        sent, rest = sent + piece, rest[size:]
    if not any(stop in text for stop in stops):
        assert matched is None
        assert sent + matcher.flush() == text
        return
    assert matched in stops
    assert text.startswith(sent + str(matched))
    assert not any(stop in sent for stop in stops)


def test_held_text_is_given_back_when_the_stop_string_does_not_come() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.push("the E") == ("the ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("x") == ("ENx", None)
    assert matcher.push("EN") == ("", None)
    assert matcher.flush() == "EN"
