"""What went wrong in other engines, each report as a test of ours. Numbers are of the projects' issues.

Elsewhere: departures of queued requests (llama.cpp #13262) in test_drain, duplicated characters (sglang #31598) in engine/test_text.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import load_file, save_file

from npufleet_pod.engine.request import FinishReason
from npufleet_pod.engine.stats import FinishedRequest
from npufleet_pod.server.metrics import EngineMetrics
from support.pod_process import PodProcess, start_pod
from support.tiny_model import write_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def client(pod: PodProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def pieces(client: OpenAI, **fields: Any) -> list[str]:
    return [chunk.choices[0].text for chunk in client.completions.create(**{**GREEDY, **fields}, stream=True)]


def still_serves(pod: PodProcess) -> None:
    assert pod.http.post(f"{pod.url}/v1/completions", json={**GREEDY, "max_tokens": 2}).status_code == 200


def test_vllm_3574_the_beginning_of_a_stop_sequence_is_not_streamed(client: OpenAI) -> None:
    text = "".join(pieces(client))
    # One that comes, and one that begins like the text but never comes.
    for stop, expected in ((text[8:12], text[: text.index(text[8:12])]), (text[5:8] + "\x00never", text)):
        assert "".join(pieces(client, stop=[stop])) == expected


def test_vllm_2577_a_stop_sequence_longer_than_a_token_ends_a_stream(client: OpenAI) -> None:
    text = "".join(pieces(client))
    for length in (6, 12, len(text) - 4):
        stop = text[3 : 3 + length]
        assert "".join(pieces(client, stop=stop)) == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_llama_cpp_24496_a_generation_ends_when_its_client_leaves(pod: PodProcess, stream: bool) -> None:
    aborted = pod.metric("vllm:request_success_total", finished_reason="abort")
    content = json.dumps({**GREEDY, "max_tokens": 2000, "ignore_eos": True, "stream": stream}).encode()
    host, port = pod.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        pod.wait(lambda: pod.state()["running"] == 1, "running")
    pod.wait(lambda: pod.state()["running"] == 0, "free again")
    assert pod.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert pod.metric("vllm:kv_cache_usage_perc") == 0


def test_vllm_26372_a_count_that_would_go_down_does_not_end_the_engine() -> None:
    metrics = EngineMetrics("tiny")
    metrics.on_step(-5, -1)
    metrics.on_first_token(-3, -0.5)
    metrics.on_next_token(-0.1)
    metrics.on_finish(FinishedRequest(FinishReason.STOP, 3, 2, 2, queue_seconds=-1, ttft_seconds=-2, e2e_seconds=-3))
    values = [
        float(line.rsplit(" ", 1)[1]) for line in metrics.render().decode().splitlines() if line.startswith("vllm:") and "_total" in line
    ]
    assert values
    assert min(values) == 0


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_sglang_5984_log_probabilities_of_scores_that_are_no_numbers_are_still_json(broken: float, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][100:110] = np.float32(broken)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with start_pod(model, tmp_path) as pod:
        pod.wait_ready()
        for temperature in (0, 1):
            fields = {"model": "tiny", "temperature": temperature, "max_tokens": 4, "ignore_eos": True}
            chat = {**fields, "messages": HELLO, "logprobs": True, "top_logprobs": 20}
            completion = {**fields, "prompt": "hello", "logprobs": 20, "echo": True}
            for path, body in (("chat/completions", chat), ("completions", completion)):
                answer = pod.http.post(f"{pod.url}/v1/{path}", json=body)
                assert answer.status_code == 200
                json.loads(answer.text, parse_constant=refuse)
                streamed = pod.http.post(f"{pod.url}/v1/{path}", json={**body, "stream": True})
                events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
                assert len(events) >= 2
                assert "error" not in [key for event in events for key in json.loads(event, parse_constant=refuse)]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_atom_1711_the_usage_chunk_has_an_empty_list_of_choices(pod: PodProcess, path: str) -> None:
    body = {**GREEDY, "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    events = pod.http.post(f"{pod.url}/v1/{path}", json=body).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    usage = json.loads(events[-3].removeprefix("data: "))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    assert all(json.loads(event.removeprefix("data: "))["usage"] is None for event in events[:-3])


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"type": "object", "properties": 7}, {"type": "array", "maxItems": 10**30}, {"$ref": "#"}, 7]
)
def test_vllm_17248_an_invalid_json_schema_does_not_end_the_server(pod: PodProcess, schema: Any) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = pod.http.post(f"{pod.url}/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "response_format": response_format})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    still_serves(pod)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["hello", ""], [[5], []]])
@pytest.mark.parametrize("echo", [False, True])
def test_vllm_7283_an_empty_prompt_does_not_end_the_server(pod: PodProcess, prompt: Any, echo: bool) -> None:
    answer = pod.http.post(f"{pod.url}/v1/completions", json={"model": "tiny", "prompt": prompt, "echo": echo, "logprobs": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    still_serves(pod)
