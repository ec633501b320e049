"""Malformed requests get an OpenAI error object, at the gateway and at an engine alike: never a 5xx, never a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from npufleet_api.contract import ENGINE_PORT
from support.team import Team

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
ANSWER_SECONDS = 30


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


BODIES: dict[str, tuple[str, Any]] = {
    "nothing": (CHAT, b""),
    "not JSON": (CHAT, b"{"),
    "not UTF-8": (CHAT, b'{"model": "\xff\xfe"}'),
    "a list": (CHAT, b"[]"),
    "a number": (CHAT, b"7"),
    "null": (CHAT, b"null"),
    "nested without end": (CHAT, b"[" * 100_000),
    "an object nested without end": (CHAT, b'{"model":' * 50_000),
    "no model": (CHAT, {"messages": HELLO}),
    "model of another type": (CHAT, {"model": 7, "messages": HELLO}),
    "empty model": (CHAT, _chat(model="")),
    "unknown model": (CHAT, _chat(model="nobody/nothing")),
    "endless model": (CHAT, _chat(model="x" * 100_000)),
    "no messages": (CHAT, {"max_tokens": 4}),
    "empty messages": (CHAT, _chat(messages=[])),
    "messages of another type": (CHAT, _chat(messages="hello")),
    "message without a role": (CHAT, _chat(messages=[{"content": "x"}])),
    "content of another type": (CHAT, _chat(messages=[{"role": "user", "content": 7}])),
    "an image": (CHAT, _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
    "negative max_tokens": (CHAT, _chat(max_tokens=-1)),
    "huge max_tokens": (CHAT, _chat(max_tokens=10**30)),
    "max_tokens beyond the model": (CHAT, _chat(max_tokens=10_000)),
    "text as max_tokens": (CHAT, _chat(max_tokens="many")),
    "temperature below zero": (CHAT, _chat(temperature=-0.1)),
    "temperature that is no number": (CHAT, b'{"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    "temperature without end": (CHAT, b'{"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}'),
    "top_p above one": (CHAT, _chat(top_p=1.5)),
    "n of a thousand": (CHAT, _chat(n=1000)),
    "tools": (CHAT, _chat(tools=[{"type": "function", "function": {"name": "f"}}])),
    "top_logprobs without logprobs": (CHAT, _chat(top_logprobs=3)),
    "stream of another type": (CHAT, _chat(stream="maybe")),
    "no prompt": (COMPLETIONS, {"max_tokens": 4}),
    "empty prompt": (COMPLETIONS, {"prompt": ""}),
    "tokens beyond the vocabulary": (COMPLETIONS, {"prompt": [1, 2**30]}),
    "negative tokens": (COMPLETIONS, {"prompt": [-1]}),
    "prompt longer than the model": (COMPLETIONS, {"prompt": "word " * 5000}),
    "prompt of another type": (COMPLETIONS, {"prompt": {"a": 1}}),
    "prompts of several types": (COMPLETIONS, {"prompt": ["a", 1]}),
    "tokenize without a prompt": ("/tokenize", {}),
    "detokenize beyond the vocabulary": ("/detokenize", {"tokens": [2**40]}),
    "detokenize text": ("/detokenize", {"tokens": "hello"}),
}
NAMELESS = {"no model", "model of another type", "empty model", "unknown model", "endless model"}
ROUTES = [
    ("GET", CHAT),
    ("PUT", COMPLETIONS),
    ("DELETE", "/v1/models"),
    ("GET", "/"),
    ("GET", "/v1"),
    ("POST", "/v1/unknown"),
    ("GET", "/v1/models/nobody%2Fnothing"),
    ("GET", "/v1/models/" + "x" * 10_000),
    ("POST", "/v1/chat/completions/"),
    ("GET", "/../../etc/passwd"),
    ("GET", "/%00"),
]


@pytest.fixture(params=["gateway", "engine"])
def door(request: pytest.FixtureRequest, served: Team) -> str:
    """host:port of a door to the model."""
    if request.param == "gateway":
        return served.address
    (pod,) = served.ready_pods("tiny")
    return f"{pod['status']['podIP']}:{ENGINE_PORT}"


def _check(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text[:500]}"
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    assert "Traceback" not in answer.text


def test_a_malformed_body_gets_an_error_object(served: Team, door: str) -> None:
    name = f"{served.namespace}/tiny"
    wrong = []
    with httpx.Client(base_url=f"http://{door}", timeout=ANSWER_SECONDS) as client:
        for what, (path, body) in BODIES.items():
            if isinstance(body, bytes):
                content = body.replace(b"MODEL", json.dumps(name).encode())
            else:
                content = json.dumps(body if what in NAMELESS else {"model": name, **body}).encode()
            try:
                _check(client.post(path, content=content, headers={"content-type": "application/json"}), 400, 404)
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_an_unknown_route_gets_an_error_object(door: str) -> None:
    wrong = []
    with httpx.Client(base_url=f"http://{door}", timeout=ANSWER_SECONDS) as client:
        for method, path in ROUTES:
            try:
                _check(client.request(method, path), 404, 405)
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                wrong.append(f"{method} {path[:50]}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_a_body_without_bound_is_refused_and_the_door_stays_open(served: Team, door: str) -> None:
    with httpx.Client(base_url=f"http://{door}", timeout=ANSWER_SECONDS) as client:
        large = b'{"model": "' + b"x" * (20 * 1024 * 1024) + b'"}'
        _check(client.post(CHAT, content=large), 413)
        good = client.post(CHAT, json={"model": f"{served.namespace}/tiny", **_chat()})
    assert good.status_code == 200
    assert served.chat("tiny") == "4 tokens"
