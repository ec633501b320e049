"""One request on its way through the simulated pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from npufleet_api.slo import Exchange, Outcome, tpot_ms
from npufleet_operator.core.observed import ModelKey


@dataclass(slots=True, eq=False)
class Request:
    """Times in seconds of simulated time."""

    model: ModelKey
    arrived: float
    input_tokens: int
    output_tokens: int
    ended: Callable[[Request, Outcome], None]
    """Called once, when the request ends in whatever way."""
    retry: Callable[[Request], None] | None = None
    """Called where a replica goes before a first token: the request goes to another one."""
    first_token: float | None = None
    attempt: int = 0
    outcome: Outcome | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the request holds when it is done."""
        return self.input_tokens + self.output_tokens

    def end(self, outcome: Outcome) -> None:
        """It ends. A second end is a defect of the simulation."""
        if self.outcome is not None:
            raise AssertionError(f"a request of {self.model} ended as {self.outcome} and again as {outcome}")
        self.outcome = outcome
        self.ended(self, outcome)

    def exchange(self, now: float) -> Exchange:
        """As the gateway judges it; all requests are streams."""
        first = self.first_token
        return Exchange(
            outcome=self.outcome or Outcome.OK,
            streamed=True,
            elapsed_ms=(now - self.arrived) * 1000,
            ttft_ms=None if first is None else (first - self.arrived) * 1000,
            tpot_ms=None if first is None else tpot_ms(first, now, self.output_tokens),
            prompt_tokens=self.input_tokens,
            generated_tokens=self.output_tokens if self.outcome is Outcome.OK else 0,
        )
