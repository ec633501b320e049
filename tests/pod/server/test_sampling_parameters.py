"""What sampling parameters do to answers, asked by the official client of a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer

from npufleet_pod.tokenizer import TextTokenizer, load_tokenizer
from support.pod_process import PodProcess, start_pod
from support.tiny_model import build_tokenizer, write_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = [5, 60, 7, 80, 9]


@pytest.fixture(scope="module")
def client(pod: PodProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> TextTokenizer:
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def ascii_only(tokenizer: TextTokenizer) -> dict[str, float]:
    """A bias that leaves only tokens of printable ASCII."""
    pieces = {token: tokenizer.token_bytes(token) or b"" for token in range(tokenizer.vocab_size)}
    return {
        str(token): -100.0 for token, piece in pieces.items() if tokenizer.is_special(token) or not all(32 <= byte < 127 for byte in piece)
    }


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def complete(client: OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in EXTRA & set(fields)}
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}, extra_body=extra)


EXTRA = {
    *("ignore_eos", "min_tokens", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "priority", "cache_salt", "never_heard_of"),
}


def test_an_echo_with_log_probabilities_scores_prompt_and_answer_as_transformers_does(
    client: OpenAI, tokenizer: TextTokenizer, oracle: Any
) -> None:
    answer = complete(client, echo=True, logprobs=3, ignore_eos=True)
    logprobs = answer.choices[0].logprobs
    tokens = [*PROMPT]
    with torch.inference_mode():
        for _ in range(12):
            tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        scores = oracle(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(tokens)
    expected = [float(scores[position, token]) for position, token in enumerate(tokens[1:])]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    for position, top in enumerate(logprobs.top_logprobs[1:]):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(scores[position].topk(3).values.tolist(), abs=1e-3)
        assert 3 <= len(top) <= 4
        assert logprobs.tokens[position + 1] in top
    assert answer.choices[0].text == tokenizer.decode(tokens, True)
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == 12


def test_an_echo_without_tokens_only_scores_the_prompt(client: OpenAI, oracle: Any) -> None:
    for prompt in ("the hello", PROMPT):
        answer = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0, n=2)
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.finish_reason == "length"
            assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == answer.usage.prompt_tokens
            assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
        assert answer.usage.completion_tokens == 0
    assert complete(client, prompt="the hello", echo=True, max_tokens=0).choices[0].text == "the hello"


def test_a_prompt_that_is_cached_already_is_scored_as_before(client: OpenAI) -> None:
    prompt = [3 + index * 7 % 200 for index in range(300)]
    first = complete(client, prompt=prompt, max_tokens=4)
    scored = [complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=4, n=n).choices for n in (1, 2)]
    assert len({choice.text for choices in scored for choice in choices}) == 1
    assert scored[0][0].text.endswith(first.choices[0].text)
    values = [choice.logprobs.token_logprobs for choices in scored for choice in choices]
    for one in values:
        assert None not in one[1:]
        assert one[1:] == pytest.approx(values[0][1:], abs=1e-4)


def test_an_echo_precedes_every_choice_whole_and_streamed(client: OpenAI) -> None:
    plain = [complete(client, prompt=text).choices[0].text for text in ("one ", "two ")]
    whole = complete(client, prompt=["one ", "two "], echo=True, n=2)
    assert [choice.text for choice in whole.choices] == ["one " + plain[0]] * 2 + ["two " + plain[1]] * 2
    streamed = dict.fromkeys(range(4), "")
    for chunk in complete(client, prompt=["one ", "two "], echo=True, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_are_where_tokens_begin_in_the_text(client: OpenAI, ascii_only: dict[str, float], echo: bool) -> None:
    answer = complete(client, prompt="hello the 日本", echo=echo, logprobs=1, logit_bias=ascii_only, temperature=1, seed=3)
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset)
    assert len(logprobs.tokens) >= 12
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    assert ("bytes:\\xe6" in logprobs.tokens) == echo


def test_a_chats_log_probabilities_spell_its_content(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=30, temperature=0.9, seed=5, logprobs=True, top_logprobs=4, logit_bias={"1": -100}
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    spelled = b"".join(bytes(one.bytes or []) for one in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    for one in choice.logprobs.content:
        assert len(one.top_logprobs) == 4
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert one.logprob <= values[0] <= 0


def test_streamed_log_probabilities_are_the_whole_ones(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "seed": 8, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = list(client.chat.completions.create(**fields, stream=True))
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []]
    assert whole.logprobs is not None
    assert [entry.model_dump() for entry in entries] == [entry.model_dump() for entry in whole.logprobs.content or []]
    assert all(chunk.choices[0].delta.content for chunk in chunks[:-1]), "an empty delta"

    whole_text = complete(client, echo=True, logprobs=2, temperature=1, seed=8).choices[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in complete(client, echo=True, logprobs=2, temperature=1, seed=8, stream=True)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces if piece for value in getattr(piece, field)] == getattr(whole_text, field)


def test_tokens_that_a_stop_cuts_off_have_no_log_probabilities(client: OpenAI, ascii_only: dict[str, float]) -> None:
    fields: dict[str, Any] = {"logprobs": 0, "logit_bias": ascii_only, "temperature": 1, "seed": 3, "max_tokens": 30}
    text = complete(client, **fields).choices[0].text
    stop = text[9:12]
    for stream in (False, True):
        answer = complete(client, **fields, stop=stop, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert choices[-1].finish_reason == "stop"
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
        spelled, sent = "".join(tokens), "".join(choice.text for choice in choices)
        assert sent == text[: text.index(stop)]
        assert spelled.startswith(sent)
        assert not "".join(tokens[:-1]).startswith(sent) or not sent


def test_penalties_change_what_repeats_and_bias_bans_and_forces(client: OpenAI, tokenizer: TextTokenizer) -> None:
    forced = complete(client, logit_bias={"65": 100}, ignore_eos=True).choices[0].text
    assert forced == tokenizer.decode([65] * 12, True)
    for name, value in (("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 50.0)):
        # The bias outweighs all others by so little that the penalty decides.
        pulled = complete(client, logit_bias={"65": 20, "66": 20, "67": 20}, ignore_eos=True, logprobs=0, **{name: value}).choices[0]
        assert len(set(pulled.logprobs.tokens[:3])) > 1, name
    banned = complete(client, logit_bias={"65": -100}, logprobs=0, temperature=2, seed=1, max_tokens=200, ignore_eos=True).choices[0]
    assert tokenizer.decode([65], True) not in banned.logprobs.tokens


def test_neutral_values_change_nothing(client: OpenAI) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "best_of": 1,
        "min_p": 0,
        "top_k": 0,
    }
    others = {"priority": -3, "cache_salt": "mine", "never_heard_of": {"x": 1}, "user": "me", "suffix": "", "logprobs": None, "echo": False}
    plain = complete(client, temperature=1, seed=2)
    assert complete(client, temperature=1, seed=2, **neutral, **others).choices == plain.choices
    assert complete(client, temperature=1, seed=2, n=2, best_of=2).choices[0] == plain.choices[0]


def test_a_seeded_answer_is_the_same_among_others(client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "seed": 77, "frequency_penalty": 0.5, "max_tokens": 30}
    alone = complete(client, **fields).choices[0]
    together = complete(client, prompt=[PROMPT, [9, 8], [100, 3, 3], [4]], **fields).choices
    assert together[0].text == alone.text
    assert complete(client, **{**fields, "seed": -77}).choices[0].text != alone.text


def test_a_stop_string_or_stop_token_is_kept_if_asked_for(client: OpenAI, tokenizer: TextTokenizer, ascii_only: dict[str, float]) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 30, "logprobs": 0, "logit_bias": ascii_only}
    whole = complete(client, **fields).choices[0]
    stop = whole.text[7:10]
    kept = complete(client, **fields, stop=[stop], include_stop_str_in_output=True).choices[0]
    assert kept.text == whole.text[: whole.text.index(stop) + 3]
    assert kept.stop_reason == stop

    last = whole.logprobs.tokens[6]
    [token] = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == last.encode()]
    end = whole.logprobs.tokens.index(last)
    for include in (False, True):
        ended = complete(client, **fields, stop_token_ids=[token], include_stop_str_in_output=include).choices[0]
        assert ended.text == "".join(whole.logprobs.tokens[: end + include])
        assert (ended.finish_reason, ended.stop_reason) == ("stop", token)


def test_special_tokens_are_text_only_if_asked_for(client: OpenAI) -> None:
    fields: dict[str, Any] = {"logit_bias": {"1": 100}, "max_tokens": 3}
    assert complete(client, **fields).choices[0].text == ""
    assert complete(client, **fields, skip_special_tokens=False).choices[0].text == "<|im_start|>" * 3


def test_an_end_before_min_tokens_is_put_off(client: OpenAI) -> None:
    fields: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 9}
    assert complete(client, **fields).usage.completion_tokens == 1
    answer = complete(client, **fields, min_tokens=5)
    assert answer.usage.completion_tokens == 6
    assert answer.choices[0].finish_reason == "stop"
    assert complete(client, **fields, ignore_eos=True).usage.completion_tokens == 9


def test_a_chat_without_text_still_tells_its_role(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logit_bias": {"2": 100}, "logprobs": True}
    [chunk] = list(client.chat.completions.create(**fields, stream=True))
    assert chunk.choices[0].delta.role == "assistant"
    assert chunk.choices[0].finish_reason == "stop"
    assert client.chat.completions.create(**fields).choices[0].logprobs.content == []


def test_the_middle_is_filled_by_a_model_with_tokens_for_it(tmp_path: Path) -> None:
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    size = build_tokenizer().get_vocab_size()
    model = write_tiny_model(tmp_path / "model", config={"vocab_size": size + len(names)})
    raw = Tokenizer.from_file(str(model / "tokenizer.json"))
    raw.add_special_tokens(names)
    raw.save(str(model / "tokenizer.json"))
    prefix, suffix = (raw.encode(text).ids for text in ("def f(", "return x"))
    with start_pod(model, tmp_path) as pod:
        pod.wait_ready()
        with OpenAI(base_url=f"{pod.url}/v1", api_key="unused", max_retries=0) as client:
            filled = complete(client, prompt="def f(", suffix="return x")
            spelled = complete(client, prompt=[size, *prefix, size + 1, *suffix, size + 2])
            assert filled.choices == spelled.choices
            assert filled.usage == spelled.usage
            assert complete(client, prompt=prefix, suffix="return x").choices == spelled.choices
            with pytest.raises(openai.BadRequestError, match="exclude each other"):
                complete(client, suffix="x", echo=True)
