"""The sampler against a plain implementation of the same definitions, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.request import GenerationRequest, SampledToken, SamplingParams, StopParams
from npufleet_pod.engine.sampling import Sampler

GREEDY = SamplingParams(temperature=0)
VOCABULARY = 12


def request(name: str, prompt: list[int], sampling: SamplingParams = GREEDY, **fields: object) -> GenerationRequest:
    stop = fields.pop("stop", StopParams(max_tokens=100))
    return GenerationRequest(name, tuple(prompt), stop, sampling, **fields)  # type: ignore[arg-type] # keyword arguments of a test


def run(sampler: Sampler, name: str, steps: list[torch.Tensor]) -> list[SampledToken]:
    return [sampler.sample([name], logits.clone()[None])[name] for logits in steps]


def plain_edit(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Bias and penalties as their definitions read."""
    edited = []
    bias, counts = dict(params.logit_bias), Counter(output)
    for token, logit in enumerate(logits):
        logit = logit + bias.get(token, 0.0)
        if token in prompt or token in counts:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty * (1 if counts[token] else 0)
        edited.append(logit)
    return edited


penalised = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.25, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.75, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(penalised, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_bias_and_penalties_equal_their_definitions(sequences: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    sampler = Sampler(VOCABULARY)
    names = [str(index) for index in range(len(sequences))]
    for name, (params, prompt) in zip(names, sequences, strict=True):
        sampler.add(request(name, prompt, params), 0, ())
    random = np.random.default_rng(seed)
    outputs: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(10):
        logits = random.standard_normal((len(names), VOCABULARY)).astype(np.float32) * 2
        sampled = sampler.sample(names, torch.from_numpy(logits.copy()))
        for row, (name, (params, prompt)) in enumerate(zip(names, sequences, strict=True)):
            expected = plain_edit(logits[row].tolist(), params, prompt, outputs[name])
            token = sampled[name].token_id
            assert expected[token] >= max(expected) - 1e-4
            outputs[name].append(token)


def test_many_distinct_tokens_are_all_remembered() -> None:
    vocabulary = 500
    sampler = Sampler(vocabulary)
    sampler.add(request("a", [0], SamplingParams(temperature=0, presence_penalty=2.0)), 0, ())
    flat = [torch.linspace(1, 0, vocabulary) for _ in range(vocabulary)]
    assert [one.token_id for one in run(sampler, "a", flat)] == list(range(vocabulary))


def test_one_sequences_penalties_and_bias_leave_the_others_as_they_are() -> None:
    logits = torch.linspace(1, 0, VOCABULARY)
    sampler = Sampler(VOCABULARY)
    sampler.add(request("plain", [0]), 0, ())
    sampler.add(request("biased", [0], replace(GREEDY, logit_bias=((7, 50.0),))), 0, ())
    sampler.add(request("repelled", [0], replace(GREEDY, repetition_penalty=100.0)), 0, ())
    sampled = sampler.sample(["plain", "biased", "repelled"], logits.repeat(3, 1))
    assert {name: one.token_id for name, one in sampled.items()} == {"plain": 0, "biased": 7, "repelled": 1}


def test_ends_are_impossible_before_min_tokens_and_ids_beyond_the_vocabulary_do_no_harm() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0, 0.0])
    stop = StopParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({1, 9999}))
    sampler = Sampler(4)
    sampler.add(request("a", [3], replace(GREEDY, logit_bias=((9999, 5.0), (0, 100.0))), stop=stop), 0, {0})
    sampler.add(request("b", [3], stop=replace(stop, ignore_eos=True)), 0, {0})
    assert [one.token_id for one in run(sampler, "a", [logits] * 4)] == [2, 2, 0, 0]
    assert [one.token_id for one in run(sampler, "b", [logits] * 4)] == [0, 0, 0, 0]


def test_seeded_tokens_depend_neither_on_the_batch_nor_on_who_else_came_or_went() -> None:
    torch.manual_seed(3)
    steps = [torch.randn(300) for _ in range(12)]
    mine = SamplingParams(temperature=0.9, top_p=0.95, seed=-5, frequency_penalty=0.3)
    alone = Sampler(300)
    alone.add(request("me", [1, 2], mine), 111, ())
    expected = [one.token_id for one in run(alone, "me", steps)]
    crowd = Sampler(300)
    crowd.add(request("me", [1, 2], mine), 222, ())
    tokens = []
    for index, logits in enumerate(steps):
        others = [f"{index}-{other}" for other in range(index % 4)]
        for other in others:
            crowd.add(request(other, [5], SamplingParams(top_k=index + 1, min_p=0.1, presence_penalty=1), logprobs=index), index, ())
        names = [*others[: index % 3], "me", *others[index % 3 :]]
        batch = torch.randn(len(names), 300)
        batch[names.index("me")] = logits
        tokens.append(crowd.sample(names, batch)["me"].token_id)
        for other in others:
            crowd.remove(other)
    assert tokens == expected


def test_a_request_without_a_seed_takes_the_engines() -> None:
    logits = torch.zeros(1000)
    streams = []
    for seed in (1, 1, 2):
        sampler = Sampler(1000)
        sampler.add(request("a", [1], SamplingParams()), seed, ())
        streams.append([one.token_id for one in run(sampler, "a", [logits] * 8)])
    assert streams[0] == streams[1] != streams[2]


def test_log_probabilities_are_of_the_models_own_scores_whatever_the_parameters() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    params = SamplingParams(temperature=0, logit_bias=((2, 100.0),), presence_penalty=2)
    sampler = Sampler(4)
    sampler.add(request("none", [0], params), 0, ())
    sampler.add(request("zero", [0], params, logprobs=0), 0, ())
    sampler.add(request("two", [0], params, logprobs=2), 0, ())
    sampler.add(request("all", [0], params, logprobs=20), 0, ())
    sampled = sampler.sample(["none", "zero", "two", "all"], logits.repeat(4, 1))
    assert sampled["none"].logprobs is None
    for name, top in (("zero", 0), ("two", 2), ("all", 4)):
        entry = sampled[name].logprobs
        assert entry is not None
        assert entry.token_id == 2
        assert entry.logprob == pytest.approx(math.log(0.125))
        assert [value for _, value in entry.top] == pytest.approx([math.log(p) for p in (0.5, 0.25, 0.125, 0.125)][:top])
        assert [token for token, _ in entry.top][:2] == [0, 1][:top]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("share", ["one", "all"])
def test_log_probabilities_are_finite_even_where_the_models_scores_are_not(bad: float, share: str) -> None:
    logits = torch.tensor([1.0, bad, 0.0]) if share == "one" else torch.full((3,), bad)
    for params in (GREEDY, SamplingParams(top_p=0.9)):
        sampler = Sampler(3)
        sampler.add(request("a", [0], params, logprobs=3), 0, ())
        entry = run(sampler, "a", [logits])[0].logprobs
        assert entry is not None
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *(value for _, value in entry.top)))


def _rows(scores: torch.Tensor, start: int, first: int, last: int) -> torch.Tensor:
    return scores[start + first : start + last]


@pytest.mark.parametrize("chunks", [[7], [1, 6], [3, 2, 2], [1] * 7])
def test_a_prompts_log_probabilities_do_not_depend_on_its_chunks(chunks: list[int]) -> None:
    prompt = [3, 1, 4, 1, 5, 0, 2]
    torch.manual_seed(0)
    scores = torch.randn(len(prompt), 6)
    expected = scores.log_softmax(-1)
    sampler = Sampler(6)
    sampler.add(request("a", prompt, prompt_logprobs=1), 0, ())
    start = 0
    for count in chunks:
        sampler.observe_prompt("a", start, count, partial(_rows, scores, start))
        start += count
    first, second = run(sampler, "a", [scores[-1], scores[-1]])
    assert second.prompt_logprobs is None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    entries = [entry for entry in first.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert [entry.logprob for entry in entries] == pytest.approx([float(expected[i, token]) for i, token in enumerate(prompt[1:])])
    assert [entry.top[0][0] for entry in entries] == scores[:-1].argmax(-1).tolist()


def test_an_unknown_request_is_removed_without_harm() -> None:
    sampler = Sampler(4)
    sampler.remove("nobody")
    assert sampler.sample([], torch.empty(0, 4)) == {}
