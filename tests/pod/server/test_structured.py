"""Answers that have to have a form, from a model whose weights are random: whatever form they have comes from the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from support.pod_process import PodProcess

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "alive": {"type": "boolean"},
        "tag": {"type": "string", "pattern": "^[a-z]{2,5}$"},
        "legs": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["kind", "alive", "tag", "legs"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 400}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 400}


class Person(BaseModel):
    kind: Literal["cat", "dog"]
    alive: bool


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"kind", "alive", "tag", "legs"}
    assert person["kind"] in ("cat", "dog")
    assert isinstance(person["alive"], bool)
    assert re.fullmatch("[a-z]{2,5}", person["tag"])
    assert 1 <= person["legs"] <= 9


@pytest.fixture(scope="module")
def client(pod: PodProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def schema_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_obeyed_whole_and_streamed_and_the_answer_stops_at_its_end(client: OpenAI, temperature: float) -> None:
    fields: dict[str, Any] = {**CHAT, "temperature": temperature, "seed": 3, "response_format": schema_format(PERSON)}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content is not None
    check_person(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_choices_obey_each_for_itself_with_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **CHAT, n=6, seed=1, temperature=2, logprobs=True, top_logprobs=2, response_format=schema_format(PERSON)
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    for choice, text in zip(answer.choices, texts, strict=True):
        check_person(text)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(one.token for one in choice.logprobs.content) == text
    assert len(set(texts)) > 1


def test_the_clients_parse_helper_gets_its_model_back(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, max_tokens=600, temperature=0, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "(yes|no), [0-9]{3}!"}, "(yes|no), [0-9]{3}!"),
        ({"guided_choice": ["red", "green", 'qu"o\nte', "日本"]}, 'red|green|qu"o\nte|日本'),
        ({"guided_grammar": 'root ::= ("ab" | "cd") "e" [0-9]'}, "(ab|cd)e[0-9]"),
        ({"guided_grammar": 'start: ("x" | "y") /[0-9]{2}/'}, "[xy][0-9]{2}"),
        ({"guided_json": {"enum": ["one", 2]}}, '"one"|2'),
        ({"guided_json": json.dumps({"type": "boolean"})}, "true|false"),
        ({"structured_outputs": {"regex": "a{3}"}}, "aaa"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"structured_outputs": {"json": {"const": None}}}, "null"),
        ({"structured_outputs": {"grammar": 'root ::= "z"'}}, "z"),
        ({"response_format": schema_format({"type": "null"})}, "null"),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_every_way_to_ask_for_a_form_is_obeyed(pod: PodProcess, fields: dict[str, Any], pattern: str, ignore_eos: bool) -> None:
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        extra = {"ignore_eos": ignore_eos, "temperature": 1, "seed": 5, "min_tokens": 3, "skip_special_tokens": True}
        answer = pod.http.post(f"{pod.url}/v1/{path}", json={**body, **extra, **fields})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"


def test_a_json_object_begins_as_one(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, response_format={"type": "json_object"})
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(" * 60_000}, "guided_regex"),
        ({"guided_regex": "a" * 300_000}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"items":' * 7000}, "guided_json"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= ' + "(" * 50_000}, "guided_grammar"),
        ({"guided_grammar": "start: " + "(" * 50_000}, "guided_grammar"),
        ({"guided_json": {"type": "string", "format": "nonsense"}}, "guided_json"),
        ({"guided_json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(9)]}] * 9}}, "guided_json"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_obeyed_is_refused_and_the_server_goes_on(pod: PodProcess, fields: dict[str, Any], param: str) -> None:
    for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        answer = pod.http.post(f"{pod.url}/v1/{path}", json={**body, **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert len(answer.json()["error"]["message"]) < 600
    assert pod.http.post(f"{pod.url}/v1/completions", json={**COMPLETION, "max_tokens": 2}).status_code == 200
