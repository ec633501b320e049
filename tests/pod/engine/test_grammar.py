"""Grammars in the sampler and in the engine: an answer obeys its own, whatever it is computed with."""

from __future__ import annotations

import asyncio
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, normalizers

from npufleet_pod.engine.grammar import Grammar, GrammarVocabulary, compile_grammar
from npufleet_pod.engine.request import FinishReason, GenerationRequest, SamplingParams, StopParams, Thoughts
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.errors import GrammarError, InvalidRequestError
from npufleet_pod.tokenizer import TextTokenizer, load_tokenizer
from support.local_engine import Recorder, collect, local_engine, request
from support.tiny_model import build_tokenizer

SIZE = build_tokenizer().get_vocab_size()
EOS = {0, 2}
PROMPTS = [[5, 6, 7], list(range(40, 90)), [9], [11] * 33, list(range(3, 40)), [77, 78]]
PATTERN = "(cat|dog|[0-9]{2}), (the|a|hello)+ [a-z]{3,7}!"


def grammar(regex: str, columns: int = SIZE) -> Grammar:
    return compile_grammar(LLMatcher.grammar_from_regex(regex), GrammarVocabulary(TextTokenizer(build_tokenizer()), columns, EOS))


def token(text: str, tokenizer: Tokenizer | None = None) -> int:
    found = (tokenizer or build_tokenizer()).token_to_id(text)
    assert found is not None
    return found


def sampled(sampler: Sampler, logits: torch.Tensor, steps: int) -> list[tuple[int, bool]]:
    outputs = [sampler.sample(["a"], logits.clone()[None])["a"] for _ in range(steps)]
    return [(one.token_id, one.grammar_ended) for one in outputs]


def sampler_of(columns: int = SIZE, params: SamplingParams | None = None, stop: StopParams | None = None, **fields: Any) -> Sampler:
    sampler = Sampler(columns)
    greedy = SamplingParams(temperature=0)
    sampler.add(GenerationRequest("a", (3,), stop or StopParams(max_tokens=99), params or greedy, **fields), 0, EOS)
    return sampler


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=1e-4), SamplingParams(top_p=0.5)])
def test_only_what_is_allowed_is_chosen_whatever_the_scores(bad: float, params: SamplingParams) -> None:
    for share in (slice(None), slice(3, SIZE, 2)):
        logits = torch.zeros(SIZE)
        logits[share] = bad
        tokens = sampled(sampler_of(params=params, grammar=grammar("ab")), logits, 2)
        assert tokens == [(token("a"), False), (token("b"), True)]


def test_bias_and_min_tokens_yield_to_the_grammar_and_columns_without_a_token_never_come() -> None:
    columns = SIZE + 37
    logits = torch.zeros(columns)
    logits[SIZE:] = 50
    biased = SamplingParams(temperature=0, logit_bias=((token("z"), 100.0), (token("a"), -100.0)))
    one = sampler_of(columns, biased, StopParams(max_tokens=9, min_tokens=5), grammar=grammar("a+", columns))
    assert [choice for choice, _ in sampled(one, logits, 5)] == [token("a")] * 5
    ended = sampler_of(columns, biased, StopParams(max_tokens=9, min_tokens=5), grammar=grammar("a{0}", columns))
    assert sampled(ended, logits, 1)[0][0] in EOS


@pytest.mark.parametrize("begun", [True, False])
def test_a_grammar_waits_for_the_end_of_thoughts(begun: bool) -> None:
    def liking(text: str) -> torch.Tensor:
        logits = torch.zeros(SIZE)
        logits[token(text)] = 9
        return logits

    sampler = sampler_of(grammar=grammar("ab"), thoughts=Thoughts(token("s"), token("w"), begun))
    if not begun:
        assert sampled(sampler, liking("s"), 1) == [(token("s"), False)]
    assert sampled(sampler, liking("q"), 3) == [(token("q"), False)] * 3
    assert sampled(sampler, liking("w"), 1) == [(token("w"), False)]
    assert sampled(sampler, liking("s"), 2) == [(token("a"), False), (token("b"), True)]


def test_an_answer_without_thoughts_obeys_from_its_first_token() -> None:
    logits = torch.zeros(SIZE)
    logits[[token("q"), token("w")]] = 9
    sampler = sampler_of(grammar=grammar("ab"), thoughts=Thoughts(token("s"), token("w"), begun=False))
    assert sampled(sampler, logits, 2) == [(token("a"), False), (token("b"), True)]


def test_a_copy_that_went_to_another_process_is_without_the_compiled_form() -> None:
    one = replace(request("a", [3]), grammar=grammar("ab"))
    copy: GenerationRequest = pickle.loads(pickle.dumps(one))  # noqa: S301 - our own bytes
    assert copy == replace(one, grammar=copy.grammar)
    assert copy.grammar is not None
    with pytest.raises(GrammarError, match="compiled in another process"):
        copy.grammar.start()


@pytest.mark.parametrize("text", ["", "{", '{"grammars": []}', "start: missing", '{"grammars": [{"json_schema": {"$ref": "#"}}]}'])
def test_a_grammar_that_is_none_or_allows_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="grammar"):
        compile_grammar(text, GrammarVocabulary(TextTokenizer(build_tokenizer()), SIZE, EOS))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_depth": 4},
        {"pipeline_depth": 1, "max_num_batched_tokens": 16},
        {"kv_blocks": 8, "block_size": 16, "pipeline_depth": 4},
        {"max_num_sequences": 2, "starvation_steps": 3},
    ],
    ids=["plain", "deep", "chunks", "preempted", "two at a time"],
)
async def test_an_answer_is_the_same_alone_and_in_any_company(settings: dict[str, Any], tiny_model: Path) -> None:
    compiled, tokenizer = grammar(PATTERN), load_tokenizer(tiny_model)

    def requests() -> list[GenerationRequest]:
        drawn = [SamplingParams(temperature=1.5, seed=index) for index in range(len(PROMPTS))]
        return [
            replace(request(str(index), prompt, 60, params), grammar=compiled if index % 3 else None)
            for index, (prompt, params) in enumerate(zip(PROMPTS, drawn, strict=True))
        ]

    async with local_engine(tiny_model, pipeline_depth=1, max_num_sequences=1, prefix_cache=False) as engine:
        alone = [await collect(engine.submit([one])) for one in requests()]
    recorder = Recorder()
    async with local_engine(tiny_model, recorder, **settings) as engine:
        generations = [engine.submit([one]) for one in requests()]
        together = [await collect(one) for one in generations]
    assert [[output.token_id for output in one] for one in together] == [[output.token_id for output in one] for one in alone]
    for index, outputs in enumerate(together):
        if index % 3:
            assert re.fullmatch(PATTERN, tokenizer.decode([output.token_id for output in outputs], True))
            assert outputs[-1].finish_reason is FinishReason.STOP
        else:
            assert outputs[-1].finish_reason is FinishReason.LENGTH
    if "kv_blocks" in settings:
        assert recorder.preempted > 0, "memory runs out, and yet nobody had to wait"


async def test_an_answer_whose_grammar_fails_ends_with_an_error_and_the_others_go_on(tiny_model: Path) -> None:
    class Failing(Grammar):
        def start(self) -> Any:
            state = super().start()
            accept = state.accept

            def fail_at_second(token_id: int) -> None:
                accept(token_id)
                state.accept = refuse  # type: ignore[method-assign] # a grammar that turns out to be too complex

            def refuse(token_id: int) -> None:
                raise GrammarError("too complex")

            state.accept = fail_at_second  # type: ignore[method-assign] # as above
            return state

    template = grammar("a{40}")
    failing = Failing(template._matcher, template._vocabulary)
    async with local_engine(tiny_model) as engine:
        bad = engine.submit([replace(request("bad", [5], 30), grammar=failing)])
        good = engine.submit([replace(request("good", [5], 60), grammar=template)])
        with pytest.raises(GrammarError, match="too complex"):
            await collect(bad)
        outputs = await collect(good)
        assert "".join(output.text for output in outputs) == "a" * 40
        # A step that was in flight when the answer ended holds its memory until it is done.
        while (snapshot := engine.snapshot()).kv_usage:  # noqa: ASYNC110 - nobody is told of it
            await asyncio.sleep(0.01)
        assert snapshot.running == 0


def test_marks_that_are_single_tokens_are_text_to_a_grammar_unless_they_are_special() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.add_special_tokens(["<|special|>"])
    vocabulary = GrammarVocabulary(TextTokenizer(tokenizer), SIZE + 20, EOS)
    state = compile_grammar(LLMatcher.grammar_from_lark('start: "<tool_call>x" | "<|special|>"'), vocabulary).start()
    allowed = {tokenizer.id_to_token(int(token_id)) for token_id in state.allowed().nonzero()[0]}
    assert allowed == {"<tool_call>", "<"}
    state.accept(token("<tool_call>", tokenizer))
    assert state.allowed().nonzero()[0].tolist() == [token("x")]


def test_a_tokenizer_that_puts_a_space_before_every_text_can_be_constrained() -> None:
    pieces = ["<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[("a", "b"), ("\u2581", "ab")], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    state = compile_grammar(
        LLMatcher.grammar_from_lark('start: "ab ab"'), GrammarVocabulary(TextTokenizer(tokenizer), len(pieces), {1})
    ).start()
    chosen = []
    while not state.ended:
        chosen.append(int(state.allowed().nonzero()[0][-1]))
        state.accept(chosen[-1])
    assert TextTokenizer(tokenizer).decode([chosen[0], *chosen], True).endswith("ab ab")
