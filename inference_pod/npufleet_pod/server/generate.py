"""From a parsed request to what the engine is asked for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from npufleet_pod.engine.request import GenerationRequest
from npufleet_pod.errors import ContextLengthError, InvalidRequestError
from npufleet_pod.server.answer import AnswerPlan
from npufleet_pod.server.echo import Echo
from npufleet_pod.server.infill import infill_tokens
from npufleet_pod.server.logprobs import Speller
from npufleet_pod.server.message import MessageFormat
from npufleet_pod.server.protocol import MAX_CHOICES, ChatBody, CompletionBody, GenerationBody, check_token_ids
from npufleet_pod.server.serving import Serving
from npufleet_pod.server.wording import ChatWording, CompletionWording, Wording
from npufleet_pod.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from npufleet_pod.engine.grammar import Grammar

INLINE_ENCODE_CHARS = 4096
"""Longer texts are encoded on a thread, so that other clients' tokens are not held up."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; a chat may fill the model's length."""


async def plan_completion(serving: Serving, body: CompletionBody) -> AnswerPlan:
    """What `POST /v1/completions` asks for. Raises RequestError."""
    _check(serving, body)
    given = body.prompts()
    prompts = [await _prompt_ids(serving, prompt, body.suffix, body.add_special_tokens) for prompt in given]
    speller = Speller(serving.files.tokenizer, bool(body.return_tokens_as_token_ids))
    wording = CompletionWording(f"cmpl-{uuid.uuid4().hex}", int(time.time()), body.model, speller)
    source = body.grammar_source()
    grammar = None if source is None else await serving.grammars.compile(source)
    plan = _plan(serving, body, prompts, body.max_tokens, DEFAULT_COMPLETION_TOKENS, wording, wording.answer_id, grammar)
    if not body.echo:
        return plan
    scored = body.logprobs is not None
    echoes = [await _echo(serving, prompt, body.skip_special_tokens, scored) for prompt in given]
    return replace(
        plan,
        requests=tuple(replace(request, prompt_logprobs=_larger(body.logprobs, body.prompt_logprobs)) for request in plan.requests),
        echoes=tuple(echo for echo in echoes for _ in range(body.n or 1)),
        prompt_only=body.max_tokens == 0,
    )


async def plan_chat(serving: Serving, body: ChatBody) -> AnswerPlan:
    """What `POST /v1/chat/completions` asks for. Raises RequestError."""
    _check(serving, body)
    messages = [message.for_template() for message in body.messages]
    tools, form = body.tool_use(), serving.tool_format
    if tools is not None and form is None:
        raise InvalidRequestError("the model's chat template has no place for tools: leave them out, or serve another model", "tools")
    text = serving.template.render(
        messages,
        body.add_generation_prompt,
        body.template_variables(),
        None if tools is None else tools.for_template(),
        continue_final_message=body.continue_final_message,
    )
    prompt = await encode(serving, text, add_special_tokens=body.add_special_tokens)
    thoughts = None if serving.reasoning is None else serving.reasoning.thoughts(text)
    answer = MessageFormat(tools, form, thoughts is not None, thoughts is not None and thoughts.begun, body.include_reasoning)
    speller = Speller(serving.files.tokenizer, bool(body.return_tokens_as_token_ids))
    wording = ChatWording(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), body.model, speller)
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    source = body.grammar_source()
    if tools is not None and form is not None:
        source = tools.grammar_source(form, source)
    grammar = None if source is None else await serving.grammars.compile(source)
    plan = _plan(serving, body, [prompt], asked, serving.limits.max_model_length, wording, wording.answer_id, grammar)
    requests = plan.requests if grammar is None else tuple(replace(request, thoughts=thoughts) for request in plan.requests)
    return replace(plan, requests=requests, message=answer)


async def encode(serving: Serving, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`. Raises ContextLengthError without encoding what is far too long."""
    tokenizer, limit = serving.files.tokenizer, serving.limits.max_model_length
    if tokenizer.fewest_tokens(text) > limit:
        raise ContextLengthError(f"the prompt has {len(text)} characters, far more than the model's {limit} tokens: shorten it", "prompt")
    if len(text) <= INLINE_ENCODE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _check(serving: Serving, body: GenerationBody) -> None:
    serving.check_model(body.model)
    if serving.encodes:
        raise InvalidRequestError("this model is an encoder and writes no text: ask /v1/embeddings", "model")
    serving.lifecycle.check_admits()
    body.check(serving.files.config.vocab_size)


async def _prompt_ids(serving: Serving, prompt: str | list[int], suffix: str | None, add_special_tokens: bool) -> list[int]:
    if not suffix:
        if isinstance(prompt, str):
            return await encode(serving, prompt, add_special_tokens=add_special_tokens)
        return checked_ids(serving, prompt)
    tokens = infill_tokens(serving.files.tokenizer)
    if tokens is None:
        raise InvalidRequestError("suffix needs a model with fill-in-the-middle tokens, this one has none: leave it out", "suffix")
    if isinstance(prompt, str):
        leading = serving.files.tokenizer.encode("", add_special_tokens=add_special_tokens)
        prefix = await encode(serving, prompt, add_special_tokens=False)
    else:
        leading, prefix = [], checked_ids(serving, prompt)
    return tokens.prompt(leading, prefix, await encode(serving, suffix, add_special_tokens=False))


async def _echo(serving: Serving, prompt: str | list[int], skip_special_tokens: bool, scored: bool) -> Echo:
    tokenizer = serving.files.tokenizer
    if isinstance(prompt, str):
        if not scored:
            return Echo(prompt)
        offsets = await asyncio.to_thread(tokenizer.offsets, prompt) if len(prompt) > INLINE_ENCODE_CHARS else tokenizer.offsets(prompt)
        return Echo(prompt, tuple(offsets))
    return Echo.of_tokens(prompt, tokenizer, skip_special_tokens)


def checked_ids(serving: Serving, token_ids: list[int], param: str = "prompt") -> list[int]:
    check_token_ids(token_ids, serving.files.config.vocab_size, param)
    return token_ids


def _plan(
    serving: Serving,
    body: GenerationBody,
    prompts: list[list[int]],
    asked_tokens: int | None,
    default_tokens: int,
    wording: Wording,
    answer_id: str,
    grammar: Grammar | None,
) -> AnswerPlan:
    copies = body.n or 1
    if len(prompts) * copies > MAX_CHOICES:
        raise InvalidRequestError(f"{len(prompts)} prompts × n {copies} is more than {MAX_CHOICES} answers: send several requests", "n")
    limit = serving.limits.max_model_length
    bad_words = tuple(bad_word_ids(serving.files.tokenizer, body.bad_words or ()))
    if grammar is not None and body.allowed_token_ids is not None:
        raise InvalidRequestError("allowed_token_ids and a form of the answer exclude each other: leave one out", "allowed_token_ids")
    prompts = [truncated(prompt, body.truncate_prompt_tokens, body.truncation_side, limit - (asked_tokens or 1)) for prompt in prompts]
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        if len(prompt) >= limit:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens, the model holds {limit} with the answer: shorten it", "prompt")
        # Where only the prompt is wanted, the engine still computes the one token that its scores come with.
        max_tokens = max(asked_tokens, 1) if asked_tokens is not None else min(default_tokens, limit - len(prompt))
        for _ in range(copies):
            index = len(requests)
            requests.append(
                GenerationRequest(
                    request_id=f"{answer_id}-{index}",
                    prompt_token_ids=tuple(prompt),
                    stop=body.stop_params(max_tokens),
                    sampling=replace(body.sampling(index), bad_words=bad_words),
                    skip_special_tokens=body.skip_special_tokens,
                    logprobs=body.top_logprobs_asked,
                    prompt_logprobs=body.prompt_logprobs,
                    priority=body.priority or 0,
                    cache_salt=body.cache_salt or "",
                    grammar=grammar,
                )
            )
    options = body.stream_options
    return AnswerPlan(
        requests=tuple(requests),
        wording=wording,
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        stream=bool(body.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        choices=copies,
    )


def truncated(prompt: list[int], keep: int | None, side: str | None, most: int) -> list[int]:
    """What truncate_prompt_tokens leaves of a prompt; -1: `most` tokens."""
    if keep is None or keep == 0:
        return prompt
    count = max(most, 1) if keep == -1 else keep
    return prompt[:count] if side == "right" else prompt[-count:]


def bad_word_ids(tokenizer: TextTokenizer, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Token ids of each word, as it is spelled at the beginning of a text and after a space (vLLM, `SamplingParams.bad_words`)."""
    for word in words:
        spelled = {tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (word.lstrip(" "), " " + word.lstrip(" "))}
        yield from (ids for ids in sorted(spelled) if ids)


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
