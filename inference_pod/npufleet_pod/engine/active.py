"""One request while it is served: its text, its end, and its times. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from npufleet_pod.engine.request import FinishReason, GenerationRequest, TokenOutput
from npufleet_pod.engine.stats import FinishedRequest
from npufleet_pod.engine.text import IncrementalDetokenizer, StopStringMatcher


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
    _detokenizer: IncrementalDetokenizer = field(init=False)
    _matcher: StopStringMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self.decode)
        self._matcher = StopStringMatcher(self.request.stop.stop_strings, self.request.stop.include_stop_string)

    def push(self, token_id: int) -> TokenOutput:
        """Take the next token; the output carries a finish reason if it is the last."""
        stop = self.request.stop
        self.generated += 1
        if token_id in self.eos_token_ids and not stop.ignore_eos:
            return self._finish(token_id, "", FinishReason.STOP, None)
        if token_id in stop.stop_token_ids:
            return self._finish(token_id, "", FinishReason.STOP, token_id)
        text = self._detokenizer.push(token_id)
        matched: str | None = None
        if self.generated >= stop.min_tokens:
            text, matched = self._matcher.push(text)
        if matched is not None:
            return TokenOutput(token_id, text, FinishReason.STOP, matched)
        if self.generated >= stop.max_tokens:
            return self._finish(token_id, text, FinishReason.LENGTH, None)
        return TokenOutput(token_id, text)

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

    def _finish(self, token_id: int, text: str, reason: FinishReason, stop_reason: int | None) -> TokenOutput:
        """Give out what was held back; a stop string that it completes still counts."""
        tail, matched = self._matcher.push(self._detokenizer.flush())
        if matched is not None:
            return TokenOutput(token_id, text + tail, FinishReason.STOP, matched)
        return TokenOutput(token_id, text + tail + self._matcher.flush(), reason, stop_reason)
