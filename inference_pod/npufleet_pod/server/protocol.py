"""Request bodies of the OpenAI API, parsed once at the border. Unknown fields are ignored, as OpenAI does."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from npufleet_pod.engine.request import MAX_TOP_LOGPROBS, SamplingParams, StopParams
from npufleet_pod.errors import InvalidRequestError
from npufleet_pod.server.body import Body
from npufleet_pod.server.structured import StructuredFields
from npufleet_pod.server.tools import ToolChoice, Tools, ToolUse
from npufleet_pod.server.unserved import UnservedFields

MAX_INPUTS = 2048
"""Most texts of a request for embeddings: OpenAI's limit."""
MAX_CHOICES = 128
"""Most sequences that one request may ask for: prompts × n."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]),
]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Truncation = Annotated[int, Field(ge=-1, le=2**31 - 1)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def check_token_ids(token_ids: Iterable[int], vocabulary: int, param: str) -> None:
    """Raise InvalidRequestError for a token id beyond the vocabulary."""
    beyond = next((token for token in token_ids if token >= vocabulary), None)
    if beyond is not None:
        raise InvalidRequestError(f"{param} holds the token id {beyond}, the vocabulary ends at {vocabulary - 1}: correct it", param)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(StructuredFields, UnservedFields, ABC):
    """What completions and chat have in common: OpenAI's fields, and those that vLLM adds."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    skip_special_tokens: bool = True
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=65536)] | None = None
    """Only these tokens may be generated."""
    bad_words: Annotated[list[BadWord], Field(max_length=128)] | None = None
    """Texts that may not be generated, alone or after a space."""
    truncate_prompt_tokens: Truncation | None = None
    """Only so many tokens of the prompt count; -1: as many as the model holds beside the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end of the prompt truncate_prompt_tokens cuts off; left unless it says otherwise."""
    prompt_logprobs: TopLogprobs | None = None
    """How many alternatives each token of the prompt is to be told with."""
    return_token_ids: bool | None = None
    """Whether token ids of prompt and answer come with the text."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens as token_id:N, which no two tokens share."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    @property
    @abstractmethod
    def top_logprobs_asked(self) -> int | None:
        """How many alternatives each token of the answer is to be told with; None: no log probabilities."""

    def check(self, vocabulary: int) -> None:
        """Raise InvalidRequestError for fields that cannot be served, or not together."""
        self.check_served()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true: leave it out or set stream", "stream_options")
        check_token_ids(self.logit_bias or (), vocabulary, "logit_bias")
        check_token_ids(self.allowed_token_ids or (), vocabulary, "allowed_token_ids")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed: leave it out, or do not stream", "prompt_logprobs")

    def sampling(self, choice: int) -> SamplingParams:
        """How choice `choice` is sampled; choices of a seeded request differ from each other and repeat."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
        )

    def stop_params(self, max_tokens: int) -> StopParams:
        """When the answer ends. Raises InvalidRequestError if min_tokens is above max_tokens."""
        if self.min_tokens > max_tokens:
            raise InvalidRequestError(f"min_tokens {self.min_tokens} is above max_tokens {max_tokens}: lower it", "min_tokens")
        return StopParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_strings=tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            include_stop_string=self.include_stop_str_in_output,
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_CHOICES)]
        | list[TokenId]
        | Annotated[list[list[TokenId]], Field(max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """0, together with echo: only the prompt, to score it."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool = True
    """Whether a prompt of text begins as the model's texts do."""

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many alternatives each token of the answer is to be told with; None: no log probabilities."""
        return self.logprobs

    def check(self, vocabulary: int) -> None:
        """Raise InvalidRequestError for fields that cannot be served, or not together."""
        super().check(vocabulary)
        copies = self.n or 1
        if self.best_of is not None and self.best_of != copies:
            remedy = "leave best_of out" if self.best_of > copies else "best_of cannot be below n"
            raise InvalidRequestError(f"best_of {self.best_of} with n {copies}: only as many as n are generated: {remedy}", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens is 0: ask for at least 1, or set echo to get the prompt back", "max_tokens")
        if self.suffix and self.echo:
            raise InvalidRequestError("echo and suffix exclude each other: leave one of them out", "echo")
        if self.echo and (self.truncate_prompt_tokens is not None or not self.add_special_tokens):
            other = "add_special_tokens" if self.truncate_prompt_tokens is None else "truncate_prompt_tokens"
            raise InvalidRequestError(f"echo and {other} exclude each other: leave one of them out", "echo")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises InvalidRequestError if there is none."""
        if not self.prompt:
            raise InvalidRequestError("prompt is empty: send at least one token", "prompt")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class ContentPart(Body):
    """One part of a message; only text is served."""

    type: Annotated[str, StringConstraints(max_length=64)]
    text: str | None = None


class Message(Body):
    """One message of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content as one string. Raises InvalidRequestError for a part that is not text."""
        fields = self.model_dump(exclude_none=True, exclude={"content"})
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text" or part.text is None:
                    raise InvalidRequestError(f"messages: a content part of type {part.type!r} is not supported: send text", "messages")
            fields["content"] = "\n".join(part.text for part in self.content if part.text is not None)
        else:
            fields["content"] = self.content or ""
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return fields


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    """A call of an earlier answer: clients send its arguments as text, templates expect an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            "messages: the arguments of a tool call are not JSON: send them as they were answered", "messages"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)]
    max_completion_tokens: Tokens | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the answer goes on where the last message ends, instead of beginning one of its own."""
    add_special_tokens: bool = False
    """Whether the prompt gets what begins the model's texts although its template writes that itself."""
    documents: Annotated[list[dict[str, Any]], Field(max_length=1024)] | None = None
    """For templates of models that answer from documents."""
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    """For templates that know it."""
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    """False: a thinking model's thoughts are left out of the answer."""

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many alternatives each token of the answer is to be told with; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, vocabulary: int) -> None:
        """Raise InvalidRequestError for fields that cannot be served, or not together."""
        super().check(vocabulary)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true: leave it out or set logprobs", "top_logprobs")
        if self.continue_final_message and "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set one of them", "continue_final_message"
            )

    def template_variables(self) -> dict[str, Any]:
        """What the template is given besides messages and tools; chat_template_kwargs go first."""
        named = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        return {**{name: value for name, value in named.items() if value is not None}, **(self.chat_template_kwargs or {})}

    def tool_use(self) -> ToolUse | None:
        """The tools that may be called, None if there are none. Raises InvalidRequestError."""
        return ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls is not False)


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    input: (
        str
        | Annotated[list[str], Field(max_length=MAX_INPUTS)]
        | list[TokenId]
        | Annotated[list[list[TokenId]], Field(max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=2**24)] | None = None
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Only so many tokens of the end of each input count; -1: as many as the model holds."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each as text or as token ids. Raises InvalidRequestError if there is none."""
        if not self.input:
            raise InvalidRequestError("input is empty: send at least one text", "input")
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[token for token in self.input if isinstance(token, int)]]
        return [one for one in self.input if not isinstance(one, int)]


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or messages that the chat template turns into one."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_048_576)]
    skip_special_tokens: bool = False
