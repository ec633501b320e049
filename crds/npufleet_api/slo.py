"""What counts towards SLO attainment: the definitions, in one place. Pure.

- TTFT: from the request's arrival at the gateway to the first chunk with generated text. Only streams have one.
- TPOT: (last token − first token) / (tokens − 1). Only streams of at least two tokens have one.
- A request attains its SLO if it was answered and missed no target. TTFT is missed the moment it is passed: a stream that still waits then
  is a miss already, however it ends. TPOT is judged at the end.
- Errors of npufleet, timeouts, interrupted streams and 429s for lack of capacity are misses. The client's own errors, and what a key's
  own limits refuse, do not count.
- A client that leaves before a target was missed does not count; one that leaves after its TTFT target passed is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; the fields of `report.Outcomes`."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    NO_REPLICA = "no_replica"
    OVERLOADED = "overloaded"
    """Refused for lack of capacity, after a wait or at once."""
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


FAILURES = frozenset({Outcome.SERVER_ERROR, Outcome.TIMEOUT, Outcome.NO_REPLICA, Outcome.OVERLOADED, Outcome.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Targets of a model; None where it has none."""

    ttft_ms: int | None = None
    tpot_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A finished request, as its client saw it. Times in milliseconds from the request's arrival."""

    outcome: Outcome
    streamed: bool
    elapsed_ms: float
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prompt_tokens: int = 0
    """As the engine counted them, else estimated."""
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a request counts towards attainment, and whether it attained."""

    judged: bool
    attained: bool = False


def outcome_of_status(status: int) -> Outcome:
    """Outcome of a complete answer with `status`. A replica's 429 says that its queue is full: capacity is ours, not the client's."""
    if status < 400:
        return Outcome.OK
    if status == 429:
        return Outcome.OVERLOADED
    if status == 504:
        return Outcome.TIMEOUT
    if status >= 500:
        return Outcome.SERVER_ERROR
    return Outcome.CLIENT_ERROR


def tpot_ms(first_token: float, last_token: float, tokens: int) -> float | None:
    """Milliseconds per output token after the first, from times in seconds; None with fewer than two tokens."""
    return (last_token - first_token) * 1000 / (tokens - 1) if tokens > 1 else None


def ttft_missed(exchange: Exchange, targets: SloTargets) -> bool:
    """Whether the TTFT target passed without a token."""
    if targets.ttft_ms is None or not exchange.streamed:
        return False
    return (exchange.elapsed_ms if exchange.ttft_ms is None else exchange.ttft_ms) > targets.ttft_ms


def tpot_missed(exchange: Exchange, targets: SloTargets) -> bool:
    """Whether the tokens of a finished stream came too slowly."""
    return targets.tpot_ms is not None and exchange.tpot_ms is not None and exchange.tpot_ms > targets.tpot_ms


def judge(exchange: Exchange, targets: SloTargets) -> Judgement:
    """Whether `exchange` counts, and whether it met every target."""
    if exchange.outcome is Outcome.CLIENT_ERROR:
        return Judgement(judged=False)
    if exchange.outcome is Outcome.CANCELLED:
        return Judgement(judged=ttft_missed(exchange, targets))
    if exchange.outcome in FAILURES:
        return Judgement(judged=True)
    return Judgement(judged=True, attained=not ttft_missed(exchange, targets) and not tpot_missed(exchange, targets))
