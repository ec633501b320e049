"""What vLLM adds to OpenAI's answers for who asks: token ids of prompt and answer, and the prompt's log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npufleet_pod.engine.request import GenerationRequest, TokenLogprobs, TokenOutput
from npufleet_pod.server.logprobs import prompt_scores
from npufleet_pod.server.wording import CompletionWording, Wording


class AnswerExtras:
    """Collects them while an answer is generated. A chat has one prompt, of which its answer tells; each choice of a completion has one."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        wording: Wording,
        token_ids: bool,
        prompt_logprobs: int | None,
        prompt_only: bool = False,
    ) -> None:
        """token_ids: whether they are told. prompt_logprobs: alternatives that each token of a prompt is told with; None: not told.

        prompt_only: the one token that the engine still computes is not in the answer.
        """
        self._requests = requests
        self._wording = wording
        self._tells_ids = token_ids
        self._prompt_only = prompt_only
        self._prompt_logprobs = prompt_logprobs
        self._ids: dict[int, list[int]] = {}
        """Of each choice, those not told yet."""
        self._scores: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._prompts_told: set[int] = set()

    @property
    def scored_tokens(self) -> int:
        """How many tokens of prompts there are scores of."""
        return sum(map(len, self._scores.values()))

    def take(self, index: int, output: TokenOutput) -> None:
        """Note the next token of choice `index`."""
        if self._tells_ids and not self._prompt_only:
            self._ids.setdefault(index, []).append(output.token_id)
        if self._prompt_logprobs is not None and output.prompt_logprobs is not None:
            self._scores[index] = output.prompt_logprobs

    def added_to(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole answer with what it is to tell besides."""
        for choice in answer["choices"]:
            index = choice["index"]
            holder = choice if isinstance(self._wording, CompletionWording) else answer
            if self._tells_ids:
                choice["token_ids"] = self._ids.get(index, [])
                holder["prompt_token_ids"] = list(self._requests[index].prompt_token_ids)
            if self._prompt_logprobs is not None and "prompt_logprobs" not in holder:
                holder["prompt_logprobs"] = prompt_scores(self._scores[index], self._prompt_logprobs, self._wording.speller)
        return answer

    def added_to_chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """A piece of a stream with the ids of the tokens that it stands for; with a choice's first piece come its prompt's."""
        if not self._tells_ids:
            return chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            choice["token_ids"] = self._ids.pop(index, [])
            if index not in self._prompts_told:
                self._prompts_told.add(index)
                holder = choice if isinstance(self._wording, CompletionWording) else chunk
                holder["prompt_token_ids"] = list(self._requests[index].prompt_token_ids)
        return chunk
