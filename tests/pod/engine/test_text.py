from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.engine.request import PlacedLogprobs, TokenLogprobs
from npufleet_pod.engine.text import MAX_HELD_TOKENS, REPLACEMENT, AnswerText, IncrementalDetokenizer, StopStringMatcher
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


@given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40))
def test_sglang_31598_no_character_is_given_out_twice_or_lost_whatever_the_tokens(tokens: list[int]) -> None:
    stream, sent = detokenizer(), ""
    for token in tokens:
        sent += stream.push(token)
    sent += stream.flush()
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert sent.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


def answer_text(stops: list[str], include: bool = False) -> AnswerText:
    return AnswerText(lambda token_ids: TOKENIZER.decode(token_ids, skip_special_tokens=True), stops, include)


@given(
    st.text(alphabet="ab🎉日 ", max_size=12),
    st.lists(st.text(alphabet="ab🎉日 ", min_size=1, max_size=4), max_size=2),
    st.booleans(),
)
def test_log_probabilities_come_with_the_text_of_their_tokens_and_only_with_text_that_is_sent(
    text: str, stops: list[str], include: bool
) -> None:
    answer, sent, matched = answer_text(stops, include), "", None
    told: list[PlacedLogprobs] = []
    tokens = TOKENIZER.encode(text).ids
    for token in tokens:
        piece, matched = answer.push(token, TokenLogprobs(token, -1.0))
        sent += piece
        told += answer.take_logprobs()
        assert bool(sent) >= bool(told), "log probabilities before any text"
        assert all(one.text_offset < len(sent) for one in told)
        if matched is not None:
            break
    else:
        piece, matched = answer.finish()
        sent += piece
        told += answer.take_logprobs()
    assert [one.logprobs.token_id for one in told] == tokens[: len(told)]
    spelled = TOKENIZER.decode(tokens[: len(told)])
    assert spelled.startswith(sent)
    if matched is None:
        assert told[len(tokens) :] == []
        assert len(told) == len(tokens)
    elif told:
        assert told[-1].text_offset < len(sent)


def test_text_before_matching_begins_is_never_held_nor_cut() -> None:
    answer = answer_text(["ab"])
    first, second, third = (TOKENIZER.encode(text).ids[0] for text in "aba")
    assert answer.push(first, match=False) == ("a", None)
    assert answer.push(second, match=False) == ("b", None)
    assert answer.push(third) == ("", None)
    assert answer.push(second) == ("", "ab")


def test_tokens_without_text_at_the_end_keep_their_log_probabilities() -> None:
    answer = answer_text([])
    special = 1
    told: list[PlacedLogprobs] = []
    for token in [*TOKENIZER.encode("a").ids, special, special]:
        answer.push(token, TokenLogprobs(token, -1.0))
        told += answer.take_logprobs()
    assert len(told) == 1
    assert answer.finish() == ("", None)
    assert [one.logprobs.token_id for one in answer.take_logprobs()] == [special, special]
