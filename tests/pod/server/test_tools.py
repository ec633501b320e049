"""Tools and thoughts over HTTP, from models whose weights are random: whatever they call comes from the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from npufleet_pod.server.chat_template import load_chat_template
from npufleet_pod.server.protocol import ChatBody
from npufleet_pod.server.tools import ToolFormat
from support.pod_process import PodProcess, start_pod
from support.tiny_model import write_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CITY = {"enum": ["Paris", "日本"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "tells it",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/City"}, "celsius": {"type": "boolean"}},
                "required": ["city", "celsius"],
                "additionalProperties": False,
                "$defs": {"City": CITY},
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if think is defined %}<think>\n{% if not think %}\n</think>\n\n{% endif %}{% endif %}"
    "{% endif %}"
)
LLAMA_TEMPLATE = '{% for tool in tools or [] %}{{ tool | tojson }} "parameters" {% endfor %}{{ messages | tojson }}'


def thinking_model(folder: Path, template: str) -> Path:
    """A tiny model whose vocabulary has the marks of thoughts and calls."""
    model = write_tiny_model(folder, config={"vocab_size": 320})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    folder = tmp_path_factory.mktemp("hermes")
    with start_pod(thinking_model(folder / "model", HERMES_TEMPLATE), folder) as pod:
        pod.wait_ready()
        yield pod


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    folder = tmp_path_factory.mktemp("llama")
    model = write_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(LLAMA_TEMPLATE)
    with start_pod(model, folder) as pod:
        pod.wait_ready()
        yield pod


def thoughts_of(message: Any) -> str:
    return getattr(message, "reasoning_content", None) or ""


def ask(pod: PodProcess, **fields: Any) -> Any:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as client:
        body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 200, "seed": 7, **fields}
        answer = client.chat.completions.create(**body)
        return list(answer) if fields.get("stream") else answer


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check_call(name: str, arguments: str) -> None:
    if name == "time":
        assert isinstance(json.loads(arguments), dict)
    else:
        assert name == "weather"
        assert json.loads(arguments)["city"] in CITY["enum"]
        assert isinstance(json.loads(arguments)["celsius"], bool)


@pytest.mark.parametrize("kind", ["hermes", "llama"])
@pytest.mark.parametrize("choice", ["named", "required"])
def test_a_call_that_is_asked_for_comes_whole_and_streamed(kind: str, choice: str, request: pytest.FixtureRequest) -> None:
    pod = request.getfixturevalue(kind)
    tools = TOOLS if choice == "named" else TOOLS[:1]
    fields = {"tools": tools, "tool_choice": named("weather") if choice == "named" else "required", "parallel_tool_calls": False}
    whole = ask(pod, **fields).choices[0]
    assert whole.message.content is None
    [call] = whole.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    assert whole.finish_reason == ("stop" if choice == "named" else "tool_calls")
    chunks = [chunk.choices[0] for chunk in ask(pod, **fields, stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert len(parts) > 3
    assert {part.index for part in parts} == {0}
    assert parts[0].id.startswith("call_")
    assert (parts[0].function.name, parts[0].type) == ("weather", "function")
    assert all(part.function.name is None and part.id is None and part.function.arguments for part in parts[1:])
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[0].delta.role == "assistant"
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == whole.finish_reason


def test_several_calls_may_come_where_they_are_wanted(hermes: PodProcess) -> None:
    thinking = Tokenizer.from_file(str(hermes.model_path / "tokenizer.json")).token_to_id("<think>")
    counts = set()
    for seed in range(8):
        choice = ask(hermes, tools=TOOLS[:1], tool_choice="required", seed=seed, temperature=2, logit_bias={str(thinking): -100}).choices[0]
        assert choice.message.tool_calls, choice
        for call in choice.message.tool_calls:
            if choice.finish_reason == "tool_calls":
                check_call(call.function.name, call.function.arguments)
        counts.add(len(choice.message.tool_calls))
    assert max(counts) > 1


def test_an_answer_is_either_calls_or_the_form_that_was_asked_for(hermes: PodProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "fine"}}}
    kinds = set()
    for seed in range(10):
        message = ask(hermes, tools=TOOLS[:1], response_format=form, seed=seed, temperature=5, max_tokens=900).choices[0].message
        kinds.add(message.content is None)
        if message.content is not None:
            assert message.content == '"fine"'
        else:
            check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
    assert kinds


def test_without_a_choice_or_with_none_text_stays_text(hermes: PodProcess) -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        choice = ask(hermes, max_tokens=12, extra_body={"ignore_eos": True}, **fields).choices[0]
        assert choice.message.content
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("begun", [True, False])
def test_thoughts_are_told_apart_and_a_form_holds_after_them(hermes: PodProcess, begun: bool) -> None:
    # The biases make the model think, and end its thoughts sooner or later.
    tokenizer = Tokenizer.from_file(str(hermes.model_path / "tokenizer.json"))
    end = tokenizer.token_to_id("</think>")
    kwargs = {"think": True} if begun else {}
    bias = {str(end): 2} if begun else {str(end): 6, str(tokenizer.token_to_id("<think>")): 9}
    fields: dict[str, Any] = {"tools": None, "logit_bias": bias, "max_tokens": 500, "temperature": 1}
    extra = {"chat_template_kwargs": kwargs, "guided_regex": "yes|no"}
    whole = ask(hermes, **fields, extra_body=extra).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.content in ("yes", "no")
    if begun:
        assert thoughts_of(whole.message)
    chunks = [chunk.choices[0].delta for chunk in ask(hermes, **fields, extra_body=extra, stream=True)]
    assert "".join(map(thoughts_of, chunks)) == thoughts_of(whole.message)
    assert "".join(delta.content or "" for delta in chunks) == whole.message.content
    hidden = ask(hermes, **fields, extra_body={**extra, "include_reasoning": False}).choices[0].message
    assert hidden.content == whole.message.content
    assert not thoughts_of(hidden)


def test_a_prompt_that_has_the_thoughts_already_leaves_the_answer_as_it_is(hermes: PodProcess) -> None:
    extra = {"chat_template_kwargs": {"think": False}, "guided_regex": "yes|no"}
    message = ask(hermes, tools=None, extra_body=extra).choices[0].message
    assert message.content in ("yes", "no")


def test_arguments_of_earlier_calls_reach_the_template_as_objects(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    template = load_chat_template(tmp_path)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "4"}]
    body = ChatBody.model_validate({"model": "m", "messages": messages, "tools": TOOLS})
    tools = body.tool_use()
    assert tools is not None
    text = template.render([message.for_template() for message in body.messages], True, None, tools.for_template())
    assert 'assistant: {"a": 1}' in text
    assert json.loads(text.split("\n")[0]) == TOOLS[0]


@pytest.mark.parametrize(
    ("template", "form"),
    [(HERMES_TEMPLATE, ToolFormat.HERMES), (LLAMA_TEMPLATE, ToolFormat.LLAMA), ("{{ messages }}", None), ("{{ tools }}", None)],
)
def test_the_chat_template_says_how_calls_are_written(template: str, form: ToolFormat | None) -> None:
    assert ToolFormat.of(template) is form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ],
)
def test_tools_that_cannot_be_served_are_refused(hermes: PodProcess, fields: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 2, **fields}
    answer = hermes.http.post(f"{hermes.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
