"""One request while it is served: its text, its end, and its times. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from npufleet_pod.engine.request import FinishReason, GenerationFailed, GenerationRequest, Output, SampledToken, TokenOutput
from npufleet_pod.engine.stats import FinishedRequest
from npufleet_pod.engine.text import AnswerText


@dataclass(slots=True)
class Times:
    """Moments of a request, on the engine's clock; None: not yet."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class ActiveRequest:
    """Receives the request's tokens one by one."""

    request: GenerationRequest
    times: Times
    eos_token_ids: Collection[int]
    decode: Callable[[Sequence[int]], str]
    generated: int = 0
    _text: AnswerText = field(init=False)

    def __post_init__(self) -> None:
        self._text = AnswerText(self.decode, self.request.stop.stop_strings, self.request.stop.include_stop_string)

    def push(self, sampled: SampledToken) -> Output:
        """Take the next token; the output carries a finish reason if it is the last."""
        if sampled.error is not None:
            return GenerationFailed(sampled.error)
        stop, token_id = self.request.stop, sampled.token_id
        self.generated += 1
        end_of_sequence = token_id in self.eos_token_ids and (sampled.grammar_ended or not stop.ignore_eos)
        ends = end_of_sequence or token_id in stop.stop_token_ids
        text, matched = "", None
        if not ends or stop.include_stop_string:
            text, matched = self._text.push(token_id, sampled.logprobs, match=self.generated >= stop.min_tokens)
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        if matched is None and (ends or sampled.grammar_ended or self.generated >= stop.max_tokens):
            reason = FinishReason.STOP if ends or sampled.grammar_ended else FinishReason.LENGTH
            stop_reason = token_id if ends and not end_of_sequence else None
            tail, matched = self._text.finish()
            text += tail
        if matched is not None:
            reason, stop_reason = FinishReason.STOP, matched
        return TokenOutput(token_id, text, reason, stop_reason, self._text.take_logprobs(), sampled.prompt_logprobs, sampled.vector)

    def finished(self, reason: FinishReason, now: float) -> FinishedRequest:
        """The request's record, once it has ended."""
        times = self.times
        return FinishedRequest(
            reason=reason,
            prompt_tokens=len(self.request.prompt_token_ids),
            generated_tokens=self.generated,
            max_tokens=self.request.stop.max_tokens,
            queue_seconds=None if times.scheduled is None else times.scheduled - times.arrived,
            ttft_seconds=None if times.first_token is None else times.first_token - times.arrived,
            e2e_seconds=now - times.arrived,
        )
