"""What sending a request to a replica costs: the time until it is done there, and what it takes from others. Pure.

cost in seconds = (prompt tokens ahead + (1 + externality) × own tokens that are not cached) × seconds per prompt token
                + EXPECTED_OUTPUT_TOKENS × seconds per output token × (1 + BATCH_SLOWDOWN × (requests held / mean − 1))

The second term is how a batch slows decoding. Both speeds are measured: that of prompts by the replica's monitor, else by a gateway that is
the only one, else on all replicas of the model (with several gateways a replica at which others queue would look slow to each); that of
answers by this gateway, else by the monitor, else on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXPECTED_OUTPUT_TOKENS = 256
QUEUE_EXTERNALITY = 8.0
"""A token computed although another replica holds it delays what queues behind. In an M/M/1 queue, work adds ρ/(1-ρ) of its length to
others' waiting: 8 at ρ = 0.89. It falls to nothing on a replica that holds less than half of the mean, where nobody queues behind: so a hot
prefix is computed where there is room rather than queued for.
"""
BATCH_SLOWDOWN = 0.25
"""The share of a decode step that grows with the batch: reading weights, which does not, is most of a step until batches are large."""
DEFAULT_PREFILL_SECONDS_PER_TOKEN = 1 / 5000
DEFAULT_TPOT_SECONDS = 0.04
"""Until a replica, or another of its model, was measured. Order of magnitude of a 13 B model on one 910B."""
REPORT_TRUST_SECONDS = 30.0
"""A report's weight falls from 1 to 0 over this age."""
NOISE = 0.25
"""Speeds that differ by less are taken to be the same."""
MEMORY_SAMPLES = 50.0
"""Speeds forget: after so many further requests a measurement counts for 1/e."""
KV_FULL_PERCENT = 95.0
"""Above this a replica preempts or queues what is sent to it."""


class Speed:
    """Seconds per token: a ratio of sums that forget, so that long prompts, which measure well, count for more than short ones."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def observe(self, seconds: float, tokens: float) -> None:
        """`tokens` took `seconds`; what cannot be is ignored."""
        if tokens <= 0 or seconds < 0:
            return
        keep = 1 - 1 / MEMORY_SAMPLES
        self._seconds = self._seconds * keep + seconds
        self._tokens = self._tokens * keep + tokens

    @property
    def value(self) -> float | None:
        """Seconds per token; None before anything was observed."""
        return self._seconds / self._tokens if self._tokens > 0 else None


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What a replica's monitor says of it. `time` is the balancer's clock when the figures were true."""

    time: float
    running: int = 0
    waiting: int = 0
    kv_cache_percent: float | None = None
    kv_cache_tokens: int | None = None
    prefill_seconds_per_token: float | None = None
    tpot_seconds: float | None = None
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per prompt token and per output token, as far as they are known."""

    prefill: float | None = None
    tpot: float | None = None


def known_speeds(sources: Iterable[Speeds]) -> tuple[float, float]:
    """The first known value of each, else the defaults."""
    prefill = tpot = None
    for source in sources:
        prefill = source.prefill if prefill is None else prefill
        tpot = source.tpot if tpot is None else tpot
    return (DEFAULT_PREFILL_SECONDS_PER_TOKEN if prefill is None else prefill, DEFAULT_TPOT_SECONDS if tpot is None else tpot)


def levelled(values: Sequence[float | None], otherwise: float) -> list[float]:
    """Speeds of replicas without what is noise among them: whose is not known, or close to the median, has the median.

    Without any that is known the median is `otherwise`. A replica that was not measured yet must look neither fast nor slow beside those
    that were, and small differences must not send every new conversation to one replica's cache.
    """
    known = sorted(value for value in values if value is not None)
    usual = known[len(known) // 2] if known else otherwise
    return [usual if value is None or abs(value - usual) <= NOISE * usual else value for value in values]


def trust(age_seconds: float) -> float:
    """Weight of figures of that age, 1 to 0."""
    return min(1.0, max(0.0, 1 - age_seconds / REPORT_TRUST_SECONDS))


def cost_seconds(tokens_ahead: float, new_tokens: float, held_over_mean: float, prefill: float, tpot: float) -> float:
    """The cost above; `prefill` and `tpot` in seconds per token."""
    externality = QUEUE_EXTERNALITY * min(1.0, 2 * held_over_mean)
    decode = EXPECTED_OUTPUT_TOKENS * tpot * (1 + BATCH_SLOWDOWN * (held_over_mean - 1))
    return (tokens_ahead + (1 + externality) * new_tokens) * prefill + decode
