"""What the answers of one request consist of so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from npufleet_pod.engine.request import FinishReason, GenerationRequest, TokenOutput
from npufleet_pod.server.delta import Delta, joined
from npufleet_pod.server.echo import Echo
from npufleet_pod.server.logprobs import ScoredToken, scored_answer
from npufleet_pod.server.message import MessageFormat, MessageParser
from npufleet_pod.server.wording import Ending


@dataclass(frozen=True, slots=True)
class Piece:
    """What one generated token adds to a choice."""

    delta: Delta
    scored: list[ScoredToken]
    ending: Ending | None


@dataclass(slots=True)
class Progress:
    """Turns outputs into pieces: an echo comes before the first; where only the prompt is wanted, nothing else does."""

    requests: Sequence[GenerationRequest]
    echoes: Sequence[Echo] = ()
    """One per request, or none."""
    prompt_only: bool = False
    message: MessageFormat | None = None
    """How answers are read; None: they are text."""
    tokens: int = 0
    """Generated tokens that count."""
    _begun: set[int] = field(default_factory=set)
    _held: dict[int, list[ScoredToken]] = field(default_factory=dict)
    """Scores that wait for text to come with."""
    _parsers: dict[int, MessageParser] = field(default_factory=dict)

    def take(self, index: int, output: TokenOutput) -> Piece:
        """The piece that the next token of choice `index` makes."""
        ending = None if output.finish_reason is None else Ending(output.finish_reason, output.stop_reason)
        echo = self.echoes[index] if self.echoes else None
        text, scored = "", []
        if index not in self._begun:
            self._begun.add(index)
            if echo is not None:
                text = echo.text
                if output.prompt_logprobs is not None:
                    scored = echo.scored(self.requests[index].prompt_token_ids, output.prompt_logprobs)
        if self.prompt_only:
            return Piece(Delta(text), scored, ending and Ending(FinishReason.LENGTH, None))
        self.tokens += 1
        delta, ending = self._read(index, text + output.text, ending)
        scored = [*self._held.pop(index, ()), *scored, *scored_answer(output.logprobs, len(echo.text) if echo is not None else 0)]
        if scored and not delta and ending is None:
            self._held[index], scored = scored, []
        return Piece(delta, scored, ending)

    def _read(self, index: int, text: str, ending: Ending | None) -> tuple[Delta, Ending | None]:
        if self.message is None:
            return Delta(text), ending
        parser = self._parsers.setdefault(index, self.message.parser())
        delta = parser.push(text)
        if ending is None:
            return delta, None
        delta = joined([delta, parser.finish()])
        return delta, Ending(ending.reason, ending.stop, called=parser.called)
