"""The official client against a real server process on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.pod_process import PodProcess

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(pod: PodProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def events(text: str) -> list[Any]:
    """The data of a whole stream; the last is the end mark."""
    blocks = text.split("\n\n")
    assert blocks[-1] == ""
    data = [block.removeprefix("data: ") for block in blocks[:-1]]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_models_are_listed_under_every_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "default/tiny"]
    assert client.models.retrieve("default/tiny").id == "default/tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_chat_answer_is_the_same_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=40, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model="default/tiny", messages=HELLO, max_completion_tokens=40, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(texts[:-1]), "an empty delta"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("prompt", ["the hello", [5, 6, 7]], ids=["text", "token ids"])
def test_a_completion_is_the_same_whole_and_streamed(client: OpenAI, prompt: Any) -> None:
    whole = client.completions.create(model="tiny", prompt=prompt, temperature=0)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    stream = client.completions.create(model="tiny", prompt=prompt, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_several_prompts_and_choices_answer_in_order(client: OpenAI) -> None:
    alone = [client.completions.create(model="tiny", prompt=text, temperature=0).choices[0].text for text in ("one", "two")]
    both = client.completions.create(model="tiny", prompt=["one", "two"], n=2, temperature=0)
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="tiny", prompt=["one", "two"], n=2, temperature=0, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == [alone[0], alone[0], alone[1], alone[1]]


def test_a_seed_repeats_and_its_choices_differ(client: OpenAI) -> None:
    first, second = (client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=4, n=2) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert texts[0] != texts[1]


def test_a_stop_string_is_cut_off_and_never_streamed(client: OpenAI) -> None:
    text = client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=30).choices[0].text
    stop = text[4:7]
    ended = client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=30, stop=[stop])
    assert ended.choices[0].text == text[: text.index(stop)]
    assert ended.choices[0].finish_reason == "stop"
    stream = client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == text[: text.index(stop)]


def test_content_parts_are_read_as_text(client: OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answers = [client.chat.completions.create(model="tiny", messages=m, max_tokens=8, temperature=0) for m in (HELLO, parts)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_continuous_usage_counts_every_token(pod: PodProcess) -> None:
    body = {**COMPLETION, "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in events(pod.http.post(f"{pod.url}/v1/completions", json=body).text)]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_every_answer_names_replica_model_and_request(pod: PodProcess) -> None:
    answer = pod.http.get(f"{pod.url}/v1/models", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.headers["x-npufleet-replica"] == "pod-0"
    assert answer.headers["x-npufleet-model"] == "tiny"
    assert len(pod.http.get(f"{pod.url}/v1/models", headers={"x-request-id": "x" * 200}).headers["x-request-id"]) == 32


def test_text_and_tokens_turn_into_each_other(pod: PodProcess) -> None:
    text = "hello 日本 🎉"
    tokens = pod.http.post(f"{pod.url}/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 2048
    assert pod.http.post(f"{pod.url}/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = pod.http.post(f"{pod.url}/tokenize", json={"messages": HELLO}).json()
    prompt = pod.http.post(f"{pod.url}/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_health_version_and_the_openapi_document(pod: PodProcess) -> None:
    assert pod.http.get(f"{pod.url}/health").json() == {"status": "ok"}
    assert pod.http.get(f"{pod.url}/ready").json() == {"status": "ready"}
    assert pod.http.get(f"{pod.url}/version").json()["version"]
    document = pod.http.get(f"{pod.url}/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in document["components"]["schemas"]["ChatBody"]["properties"]


def test_metrics_count_what_was_done(pod: PodProcess, client: OpenAI) -> None:
    names = ["vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"]
    before = [pod.metric(name) for name in names]
    finished = pod.metric("vllm:request_success_total", finished_reason="length")
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True})
    assert [pod.metric(name) for name in names] == [before[0] + 3, before[1] + 4, before[2] + 1]
    assert pod.metric("vllm:request_success_total", finished_reason="length") == finished + 1
    assert pod.metric("vllm:inter_token_latency_seconds_count") >= 3
    assert pod.metric("vllm:num_requests_running") == 0
    assert pod.metric("vllm:kv_cache_usage_perc") == 0
    assert pod.metric("vllm:cache_config_info", block_size="32") == 1
    assert pod.metric("npufleet:engine_state", state="Ready") == 1
    assert pod.metric("npufleet:load_seconds") > 0
    assert pod.metric("npufleet:max_num_sequences") >= 1


CHAT = {"model": "tiny", "messages": HELLO}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
COMPLETION = {"model": "tiny", "prompt": "x"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "said"),
    [
        ("chat/completions", "{", 400, None, "Invalid JSON"),
        ("chat/completions", "", 400, None, "Invalid JSON"),
        ("chat/completions", "[" * 50_000, 400, None, "Invalid JSON"),
        ("chat/completions", '{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None, "Invalid JSON"),
        ("chat/completions", "[]", 400, None, "Input should be an object"),
        ("chat/completions", {"model": "tiny"}, 400, "messages", "messages: field is missing"),
        ("chat/completions", {"messages": HELLO}, 400, "model", "model: field is missing"),
        ("chat/completions", {**CHAT, "model": "gpt"}, 404, "model", "the model 'gpt' does not exist"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages", "at least 1 item"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "send text"),
        ("chat/completions", {**CHAT, "temperature": -1}, 400, "temperature", "greater than or equal to 0, got -1"),
        ("chat/completions", '{"model": "tiny", "messages": [{"role": "user"}], "temperature": NaN}', 400, "temperature", "finite"),
        ("chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ("chat/completions", {**CHAT, "max_tokens": 5000}, 400, "max_tokens", "the model holds 2048"),
        ("chat/completions", {**CHAT, "max_tokens": 10**30}, 400, "max_tokens", "max_tokens"),
        ("chat/completions", {**CHAT, "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "min_tokens 9 is above max_tokens 8"),
        ("chat/completions", {**CHAT, "seed": 2**70}, 400, "seed", "seed"),
        ("chat/completions", {**CHAT, "n": 1000}, 400, "n", "less than or equal to 128"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", "top_logprobs needs logprobs: true"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "less than or equal to 20"),
        ("chat/completions", {**CHAT, "presence_penalty": 2.5}, 400, "presence_penalty", "less than or equal to 2, got 2.5"),
        ("chat/completions", {**CHAT, "frequency_penalty": -3}, 400, "frequency_penalty", "greater than or equal to -2, got -3"),
        ("chat/completions", {**CHAT, "repetition_penalty": 0}, 400, "repetition_penalty", "greater than or equal to 0.01, got 0"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias", "less than or equal to 100, got 101"),
        ("chat/completions", {**CHAT, "logit_bias": {"hello": 1}}, 400, "logit_bias", "valid integer"),
        ("chat/completions", {**CHAT, "logit_bias": {"99999": 1}}, 400, "logit_bias", "the token id 99999, the vocabulary ends at"),
        (
            "chat/completions",
            '{"model": "tiny", "messages": [{"role": "user"}], "logit_bias": {"5": Infinity}}',
            400,
            "logit_bias",
            "finite",
        ),
        ("chat/completions", {**CHAT, "priority": "high"}, 400, "priority", "valid integer"),
        ("chat/completions", {**CHAT, "cache_salt": ""}, 400, "cache_salt", "at least 1 character"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "function: field is missing"),
        ("chat/completions", {**CHAT, "tools": TOOLS}, 400, "tools", "the model's chat template has no place for tools"),
        ("chat/completions", {**CHAT, "tools": TOOLS * 2}, 400, "tools", "'f' more than once"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
        (
            "chat/completions",
            {**CHAT, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            400,
            "tool_choice",
            "names 'g', which is not among tools",
        ),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format", "'xml' is not supported"),
        (
            "chat/completions",
            {**CHAT, "stream": False, "stream_options": {"include_usage": True}},
            400,
            "stream_options",
            "needs stream: true",
        ),
        ("chat/completions", {**CHAT, "stop": ["a", ""]}, 400, "stop", "stop.1: String should have at least 1 character"),
        ("completions", {**COMPLETION, "prompt": ""}, 400, "prompt", "prompt is empty"),
        ("completions", {**COMPLETION, "prompt": []}, 400, "prompt", "prompt is empty"),
        ("completions", {**COMPLETION, "prompt": [[]]}, 400, "prompt", "the prompt has no tokens"),
        ("completions", {**COMPLETION, "prompt": [99999]}, 400, "prompt", "the token id 99999, the vocabulary ends at"),
        ("completions", {**COMPLETION, "prompt": [5, -1]}, 400, "prompt", "prompt.1: Input should be greater than or equal to 0"),
        ("completions", {**COMPLETION, "prompt": "x" * 100_000}, 400, "prompt", "far more than the model's 2048 tokens"),
        ("completions", {**COMPLETION, "prompt": [5] * 2048}, 400, "prompt", "the prompt has 2048 tokens"),
        ("completions", {**COMPLETION, "prompt": ["x"] * 65, "n": 2}, 400, "n", "more than 128 answers"),
        ("completions", {**COMPLETION, "best_of": 2}, 400, "best_of", "best_of 2 with n 1: only as many as n are generated"),
        ("completions", {**COMPLETION, "n": 3, "best_of": 2}, 400, "best_of", "best_of cannot be below n"),
        ("completions", {**COMPLETION, "logprobs": 21}, 400, "logprobs", "less than or equal to 20, got 21"),
        ("completions", {**COMPLETION, "logprobs": -1}, 400, "logprobs", "greater than or equal to 0"),
        ("completions", {**COMPLETION, "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0: ask for at least 1, or set echo"),
        ("completions", {**COMPLETION, "suffix": "end"}, 400, "suffix", "a model with fill-in-the-middle tokens, this one has none"),
        ("completions", {**COMPLETION, "suffix": "end", "echo": True}, 400, "echo", "echo and suffix exclude each other"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_gets_an_error_object_that_says_what_to_mend(
    pod: PodProcess, path: str, body: Any, status: int, param: str | None, said: str, stream: bool
) -> None:
    content = body if isinstance(body, str) else json.dumps({"stream": stream, **body})
    answer = pod.http.post(f"{pod.url}/v1/{path}", content=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/drain", 404),
        ("GET", "/v1/models/", 404),
    ],
)
def test_routes_that_are_not_there_get_an_error_object(pod: PodProcess, method: str, path: str, status: int) -> None:
    answer = pod.http.request(method, f"{pod.url}{path}")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_beyond_the_limit_is_refused_unread(pod: PodProcess) -> None:
    answer = pod.http.post(f"{pod.url}/v1/completions", content=b" " * (16 * 1024 * 1024 + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_logs_are_json_with_request_ids_and_never_hold_a_prompt(pod: PodProcess, client: OpenAI) -> None:
    secret = "a very private prompt"
    client.completions.create(model="tiny", prompt=secret, max_tokens=2, extra_headers={"x-request-id": "find-me"})
    pod.wait(lambda: any(line.get("request_id") == "find-me" for line in pod.logs()), "logged")
    line = next(line for line in pod.logs() if line.get("request_id") == "find-me")
    assert (line["path"], line["status"], line["level"]) == ("/v1/completions", 200, "INFO")
    assert secret not in json.dumps(pod.logs())
    assert pod.stderr == ""
