"""Every parameter that vLLM 0.33 knows is served, harmlessly ignored, or refused by name. The lists are of its protocol's classes
(`entrypoints/openai/chat_completion/protocol.py`, `entrypoints/openai/completion/protocol.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from npufleet_pod.server.protocol import ChatBody, CompletionBody, GenerationBody
from npufleet_pod.server.unserved import REMEDIES, UnservedFields
from support.pod_process import PodProcess

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
IGNORED = {
    *("user", "spaces_between_special_tokens", "media_io_kwargs", "mm_processor_kwargs", "mm_payload", "request_id", "session_id"),
    *("routed_experts_prompt_start", "vllm_xargs", "stream_interval"),
}
"""They name what is not there (images, experts to be replayed), whom it is for, or what changes no text."""
BOTH = """
frequency_penalty logit_bias logprobs max_tokens model n presence_penalty response_format seed stop stream stream_options temperature
top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos
min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
allowed_token_ids bad_words echo add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
CHAT = """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
COMPLETION = "prompt suffix prompt_embeds"


@pytest.fixture(scope="module")
def client(pod: PodProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


@pytest.mark.parametrize(("body", "names"), [(ChatBody, CHAT), (CompletionBody, COMPLETION)])
def test_every_parameter_of_vllm_is_known_or_ignored_on_purpose(body: type[GenerationBody], names: str) -> None:
    known = {*BOTH.split(), *names.split()}
    assert known - body.model_fields.keys() == known & IGNORED
    assert UnservedFields.model_fields.keys() == REMEDIES.keys()


ASKS = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "return_mm_kwargs": True,
    "return_weight_versions": True,
    "watermarking": {"key": 1},
    "chat_template": "{{ messages }}",
    "modalities": ["text", "audio"],
}


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_what_cannot_be_served_is_refused_by_name_unless_it_asks_for_nothing(pod: PodProcess, name: str) -> None:
    chat = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    answer = pod.http.post(f"{pod.url}/v1/chat/completions", json={**chat, name: ASKS.get(name, {"x": 1})})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert "is not supported: " in answer.json()["error"]["message"]
    for neutral in (None, False, *REMEDIES[name][0]):
        assert pod.http.post(f"{pod.url}/v1/chat/completions", json={**chat, name: neutral}).status_code == 200


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_changes_no_answer_is_ignored(pod: PodProcess, name: str) -> None:
    for path, body in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "x"})):
        answer = pod.http.post(f"{pod.url}/v1/{path}", json={"model": "tiny", "max_tokens": 1, name: {"x": 1}, **body})
        assert answer.status_code == 200


def complete(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": [5, 60, 7], "temperature": 0, "max_tokens": 12, **fields}, extra_body=extra
    )


def test_token_ids_come_with_the_text_whole_and_streamed(client: OpenAI, pod: PodProcess) -> None:
    whole = complete(client, {"return_token_ids": True, "ignore_eos": True}, prompt=[[5, 60, 7], [9, 8]], n=2)
    assert [choice.prompt_token_ids for choice in whole.choices] == [[5, 60, 7]] * 2 + [[9, 8]] * 2
    assert all(len(choice.token_ids) == 12 for choice in whole.choices)
    text = pod.http.post(f"{pod.url}/detokenize", json={"tokens": whole.choices[0].token_ids, "skip_special_tokens": True}).json()["prompt"]
    assert text == whole.choices[0].text
    streamed: dict[int, list[int]] = {}
    prompts = []
    for chunk in complete(client, {"return_token_ids": True, "ignore_eos": True}, prompt=[[5, 60, 7], [9, 8]], n=2, stream=True):
        streamed.setdefault(chunk.choices[0].index, []).extend(chunk.choices[0].token_ids)
        prompts += [chunk.choices[0].prompt_token_ids] if "prompt_token_ids" in chunk.choices[0].model_extra else []
    assert [streamed[index] for index in range(4)] == [choice.token_ids for choice in whole.choices]
    assert len(prompts) == 4
    chat: Any = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, extra_body={"return_token_ids": True})
    assert pod.http.post(f"{pod.url}/tokenize", json={"messages": HELLO}).json()["tokens"] == chat.prompt_token_ids
    assert "token_ids" not in complete(client).choices[0].model_extra


def test_a_prompts_scores_are_those_of_its_echo(client: OpenAI) -> None:
    scored = complete(client, {"prompt_logprobs": 2}).choices[0].prompt_logprobs
    echoed = complete(client, echo=True, logprobs=2).choices[0].logprobs
    assert scored[0] is None
    for entry, token, value in zip(scored[1:], [60, 7], echoed.token_logprobs[1:3], strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert sorted(one["rank"] for one in entry.values() if one["rank"]) in ([1, 2], [1, 2, 3])
    chat: Any = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


def test_tokens_are_named_by_id_if_asked_for(client: OpenAI) -> None:
    answer = complete(client, {"return_tokens_as_token_ids": True, "return_token_ids": True}, logprobs=1).choices[0]
    assert answer.logprobs.tokens == [f"token_id:{token}" for token in answer.token_ids[: len(answer.logprobs.tokens)]]


def test_only_allowed_tokens_come_and_bad_words_never_do(client: OpenAI, pod: PodProcess) -> None:
    allowed = complete(client, {"allowed_token_ids": [70, 71], "return_token_ids": True}, temperature=1, seed=1).choices[0]
    assert set(allowed.token_ids) <= {70, 71}
    plain = complete(client, {"return_token_ids": True, "ignore_eos": True}, max_tokens=30).choices[0]
    words = [pod.http.post(f"{pod.url}/detokenize", json={"tokens": plain.token_ids[at : at + 1]}).json()["prompt"] for at in range(30)]
    bad = next(word for word in words if word.isascii() and word.isprintable() and word.strip())
    clean = complete(client, {"bad_words": [bad], "return_token_ids": True, "ignore_eos": True}, max_tokens=30).choices[0]
    banned = pod.http.post(f"{pod.url}/tokenize", json={"prompt": bad, "add_special_tokens": False}).json()["tokens"]
    assert len(banned) == 1
    assert banned[0] in plain.token_ids
    assert banned[0] not in clean.token_ids


def test_a_prompt_is_truncated_from_the_side_asked_for(client: OpenAI) -> None:
    prompt = list(range(5, 105))
    for fields, kept in (({}, prompt[-10:]), ({"truncation_side": "right"}, prompt[:10])):
        cut = complete(client, {"truncate_prompt_tokens": 10, "return_token_ids": True, **fields}, prompt=prompt).choices[0]
        assert cut.prompt_token_ids == kept
        assert cut.text == complete(client, prompt=kept).choices[0].text
    long = complete(client, {"truncate_prompt_tokens": -1}, prompt=[5] * 2048, max_tokens=8)
    assert long.usage.prompt_tokens == 2040


@pytest.mark.parametrize("beginning", ["The answer is ", "|", "<", "im_end"])
def test_an_answer_goes_on_with_the_last_message(client: OpenAI, pod: PodProcess, beginning: str) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": beginning}]
    answer: Any = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=2,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )
    prompt = pod.http.post(f"{pod.url}/detokenize", json={"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert prompt.endswith(f"<|im_start|>assistant\n{beginning}")
    told = pod.http.post(f"{pod.url}/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert told["tokens"] == answer.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("chat/completions", {"echo": True}, "echo"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ("chat/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
        ("chat/completions", {"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
        ("completions", {"bad_words": [""]}, "bad_words"),
        ("completions", {"truncation_side": "middle"}, "truncation_side"),
        ("completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("completions", {"truncate_prompt_tokens": 2, "echo": True}, "echo"),
    ],
)
def test_what_excludes_each_other_is_told(pod: PodProcess, path: str, fields: dict[str, Any], param: str) -> None:
    answer = pod.http.post(f"{pod.url}/v1/{path}", json={"model": "tiny", "messages": HELLO, "prompt": "x", **fields})
    assert answer.status_code == 400, json.dumps(answer.json())
    assert answer.json()["error"]["param"] == param
