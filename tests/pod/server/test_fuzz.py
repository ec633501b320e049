"""Whatever a client sends, it gets an answer that is not a server error, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.pod_process import PodProcess

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
FIELDS = [
    *("model", "messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "stream"),
    *("stream_options", "stop_token_ids", "logit_bias", "tools", "tool_choice", "response_format", "tokens", "min_tokens"),
    *("chat_template_kwargs", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "logprobs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("frequency_penalty", "repetition_penalty", "top_logprobs", "best_of", "echo", "suffix", "priority", "cache_salt"),
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
bases: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"model": "tiny", "prompt": "hello", "max_tokens": 2},
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
        {"model": "tiny", "tokens": [5, 6]},
    ]
)
bodies = st.builds(lambda base, change: {**base, **change}, bases, st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
raw = st.binary(max_size=100) | st.text(max_size=100).map(str.encode)


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
def test_no_body_makes_a_server_error(pod: PodProcess, path: str) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def fuzz(body: dict[str, Any]) -> None:
        check(pod.http.post(f"{pod.url}{path}", content=json.dumps(body)))

    fuzz()
    assert pod.http.get(f"{pod.url}/ready").status_code == 200


def test_no_bytes_make_a_server_error(pod: PodProcess) -> None:
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(PATHS), raw)
    def fuzz(path: str, body: bytes) -> None:
        check(pod.http.post(f"{pod.url}{path}", content=body))

    fuzz()
    assert pod.http.get(f"{pod.url}/ready").status_code == 200


def test_the_admin_port_refuses_what_it_does_not_understand(pod: PodProcess) -> None:
    for body in (b"", b"{}", b"[]", b'{"deadline_seconds": -1}', b'{"deadline_seconds": NaN}', b'{"deadline_seconds": 1, "x": 1}'):
        answer = pod.http.post(f"{pod.admin_url}/drain", content=body)
        assert answer.status_code == 400
        check(answer)
    assert pod.state()["state"] == "Ready"
