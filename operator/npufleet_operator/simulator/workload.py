"""Who sends what when: closed loops of clients, and traces. Seeded; the same requests for every policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

from npufleet_operator.core.observed import ModelKey
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.scenario import SimulatedModel
from npufleet_operator.simulator.traces import TraceRequest

Send = Callable[[ModelKey, int, int, Callable[[bool], None]], None]
"""Send a request of a model with its lengths; the last argument is called at its end with whether it was refused for lack of capacity."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`clients` clients, each of which sends its next request when the last one has ended. The model of each request is drawn by share."""

    clients: int

    def start(self, clock: Clock, models: Sequence[SimulatedModel], send: Send, until: float, seed: int, retry_after: float) -> None:
        """Every client sends its first request now."""
        shares = [model.share for model in models]

        def client(number: int) -> None:
            # A stream of its own for each client: what one draws does not depend on how fast the others are served.
            drawn = random.Random(f"{seed}/{number}")  # noqa: S311 - a simulation

            def next_request() -> None:
                if clock.now >= until:
                    return
                model = drawn.choices(models, shares)[0]
                send(model.key, *lengths(model, drawn), ended)

            def ended(refused: bool) -> None:
                if refused:
                    clock.after(retry_after, next_request)
                else:
                    next_request()

            clock.after(0, next_request)

        for number in range(self.clients):
            client(number)


@dataclass(frozen=True, slots=True)
class Traces:
    """Arrivals of models at their recorded times, whatever happens to those before."""

    of: Sequence[tuple[ModelKey, Sequence[TraceRequest]]]

    def start(self, clock: Clock, models: Sequence[SimulatedModel], send: Send, until: float, seed: int, retry_after: float) -> None:
        """Requests arrive from now on, as long as `until` has not come."""
        for key, requests in self.of:
            self._follow(clock, key, requests, send, clock.now, until)

    def _follow(self, clock: Clock, key: ModelKey, requests: Sequence[TraceRequest], send: Send, start: float, until: float) -> None:
        position = 0

        def arrive() -> None:
            nonlocal position
            request = requests[position]
            position += 1
            send(key, request.input_tokens, request.output_tokens, lambda refused: None)
            plan()

        def plan() -> None:
            if position < len(requests) and start + requests[position].seconds < until:
                clock.at(start + requests[position].seconds, arrive)

        plan()


Workload = ClosedLoop | Traces


def lengths(model: SimulatedModel, drawn: random.Random) -> tuple[int, int]:
    """Log-normal numbers of prompt and answer tokens with the model's means; together at most what a replica's memory holds."""
    sigma = model.length_sigma
    prompt, answer = (
        max(1, round(drawn.lognormvariate(log(mean) - sigma**2 / 2, sigma))) for mean in (model.input_tokens, model.output_tokens)
    )
    room = model.roofline.kv_tokens
    answer = min(answer, max(1, room // 2))
    return max(1, min(prompt, room - answer)), answer
