"""Messages read as they come: however an answer is cut, it is the same message."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.server.delta import Delta, joined
from npufleet_pod.server.message import MessageParser
from npufleet_pod.server.reasoning import ReasoningSplitter
from npufleet_pod.server.tool_parser import HermesParser, LlamaParser

WEATHER = '{"name": "weather", "arguments": {"city": "Pa\\"r}is", "days": [1, {"x": 2}]}}'
TIME = '{"name": "time", "arguments": {}}'
Calls = list[tuple[str, str]]


def parser(kind: str) -> MessageParser:
    splitter = ReasoningSplitter(begun="begun" in kind) if "think" in kind else None
    tools = HermesParser() if "hermes" in kind else LlamaParser({"weather", "time"}) if "llama" in kind else None
    return MessageParser(splitter, tools)


def read(kind: str, pieces: list[str]) -> tuple[str, str, Calls]:
    one = parser(kind)
    deltas = [*(one.push(piece) for piece in pieces), one.finish()]
    seen: set[int] = set()
    for delta in deltas:
        for call in delta.calls:
            assert (call.name is not None) == (call.index not in seen), "a call is named once, by its first part"
            assert call.name is not None or call.arguments, "an empty delta"
            seen.add(call.index)
    assert seen == set(range(len(seen)))
    whole = joined(deltas)
    return whole.content, whole.reasoning, [(call.name or "", call.arguments) for call in whole.calls]


@pytest.mark.parametrize(
    ("kind", "text", "content", "reasoning", "calls"),
    [
        ("", "hello", "hello", "", []),
        ("hermes", "hello <b>", "hello <b>", "", []),
        ("hermes", f"<tool_call>\n{TIME}\n</tool_call>", "", "", [("time", "{}")]),
        (
            "hermes",
            f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>{TIME}</tool_call>\n",
            "Let me see.",
            "",
            [("weather", '{"city": "Pa\\"r}is", "days": [1, {"x": 2}]}'), ("time", "{}")],
        ),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>', "", "", [("late", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", "", [("f", '{"a": ')]),
        ("hermes", "<tool_call>not a call</tool_call>", "<tool_call>not a call</tool_call>", "", []),
        ("hermes", '<tool_call>{"a": 1}</tool_call> x', '<tool_call>{"a": 1}</tool_call> x', "", []),
        ("hermes", '<tool_call>{"na', '<tool_call>{"na', "", []),
        ("hermes", '<tool_call>{"name": ""}', '<tool_call>{"name": ""}', "", []),
        ("hermes", f"<tool_call>{TIME}<tool_call>{TIME}", "", "", [("time", "{}"), ("time", "{}")]),
        ("hermes", f"<tool_call>{TIME}</tool_call>\nDone.", "\nDone.", "", [("time", "{}")]),
        ("hermes", "a <tool_ca", "a <tool_ca", "", []),
        ("llama", '{"name": "time", "parameters": {}}', "", "", [("time", "{}")]),
        ("llama", '<|python_tag|>{"type": "function", "name": "time", "parameters": {"a": 1}}', "", "", [("time", '{"a": 1}')]),
        ("llama", f'{TIME}; {{"name": "weather", "parameters": {{"a": [";"]}}}}', "", "", [("time", "{}"), ("weather", '{"a": [";"]}')]),
        ("llama", ' {"name": "Bob", "age": 3}', ' {"name": "Bob", "age": 3}', "", []),
        ("llama", '{"answer": 42} ', '{"answer": 42} ', "", []),
        ("llama", " plain {text}", " plain {text}", "", []),
        ("llama", '{"name": "time", "parameters": {"a"', "", "", [("time", '{"a"')]),
        ("llama", "<|python", "<|python", "", []),
        ("think", "<think>\nhm\n\n</think>\n\nhello", "hello", "hm", []),
        ("think", "hello <think>", "hello <think>", "", []),
        ("think", "<think>never ends\n", "", "never ends", []),
        ("think", "<thi", "<thi", "", []),
        ("think begun", "\nhm\n</think>\nhello", "hello", "hm", []),
        ("think begun", "hm </thin", "", "hm </thin", []),
        ("think hermes", f"<think>a <tool_call> b</think>\n\n<tool_call>\n{TIME}\n</tool_call>", "", "a <tool_call> b", [("time", "{}")]),
    ],
)
def test_messages_are_read_whole_and_in_single_characters(kind: str, text: str, content: str, reasoning: str, calls: Calls) -> None:
    assert read(kind, [text]) == (content, reasoning, calls)
    assert read(kind, list(text)) == (content, reasoning, calls)


fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<tool", "\n", " ", ";", ",", "{", "}", '"', ":", "\\"),
        *('"name"', '"time"', '"arguments"', '"parameters"', "[", "]", "1", "null", "x", WEATHER, TIME, '{"name": "time", '),
    ]
)
texts = st.lists(fragments, max_size=14).map("".join)


@given(st.sampled_from(["hermes", "llama", "think", "think begun", "think hermes", "think llama", "think begun hermes"]), texts, st.data())
def test_however_an_answer_is_cut_it_is_the_same_message(kind: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    whole = read(kind, [text])
    assert read(kind, pieces) == whole
    assert read(kind, list(text)) == whole


@given(st.lists(st.tuples(st.sampled_from(["time", "weather"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6,
)), min_size=1, max_size=4))  # fmt: skip
def test_every_call_that_a_model_writes_well_is_found(calls: list[tuple[str, object]]) -> None:
    written = [{"name": name, "arguments": {"value": value}} for name, value in calls]
    for kind, text in (
        ("hermes", "\n".join(f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in written)),
        ("llama", "; ".join(json.dumps(one) for one in written)),
    ):
        content, _, found = read(kind, [text])
        assert content == ""
        assert [{"name": name, "arguments": json.loads(arguments)} for name, arguments in found] == written


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    one = parser("hermes")
    assert [one.push(piece).content for piece in ("Hel", "lo <", "b> and", " ")] == ["Hel", "lo", " <b> and", ""]
    arguments = [one.push(piece) for piece in ('<tool_call>{"name": "f", "arguments": {"te', 'xt": "ab', 'c"}', "}</tool_call>")]
    assert ["".join(call.arguments for call in delta.calls) for delta in arguments] == ['{"te', 'xt": "ab', 'c"}', ""]
    assert one.called


def test_a_limit_drops_further_calls() -> None:
    for one in (HermesParser(1), LlamaParser({"time"}, 1)):
        text = f"<tool_call>{TIME}</tool_call><tool_call>{TIME}</tool_call>" if isinstance(one, HermesParser) else f"{TIME};{TIME}"
        delta = joined([*(one.push(character) for character in text), one.finish()])
        assert (delta.content, len(delta.calls)) == ("", 1)


def test_thoughts_can_be_left_out() -> None:
    one = MessageParser(ReasoningSplitter(begun=True), silent=True)
    assert joined([one.push("hm</think>hello"), one.finish()]) == Delta("hello")
