"""What loading gives to the engine: a model that is ready to compute, and what it needs around it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from npufleet_pod.engine.changes import Change
from npufleet_pod.engine.request import SampledToken
from npufleet_pod.engine.scheduler import SchedulerLimits, SchedulerPolicy
from npufleet_pod.engine.step import Step
from npufleet_pod.engine.tiering import Tiers


class Ranks(Protocol):
    """The other ranks of a tensor-parallel model; see `distributed.group.RankGroup`."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Have `on_failure` called, on any thread, when one of them can no longer take part."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class NoRanks:
    """An unsharded model's."""

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """Nobody to watch."""

    def close(self) -> None:
        """Nobody to end."""


class Runner(Protocol):
    """Computes steps; see `runner.ModelRunner`. `prepare` is called on one thread, `compute` on another, each in order."""

    def prepare(self, step: Step, changes: Sequence[Change]) -> Any: ...

    def compute(self, batch: Any) -> dict[str, SampledToken]: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading gives to the engine."""

    runner: Runner
    limits: SchedulerLimits
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int], bool], str]
    """Text of token ids; the flag leaves special tokens out."""
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    prefix_cache: bool = True
    tiers: Tiers = field(default_factory=Tiers)
    ranks: Ranks = field(default_factory=NoRanks)
