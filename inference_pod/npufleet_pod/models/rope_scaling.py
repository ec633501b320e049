"""How a model's rotary frequencies are stretched beyond the length it was trained on. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from npufleet_pod.errors import ModelError, shorten

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positions = Annotated[int, Field(ge=1, le=1 << 24)]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """The base grows with the sequence's length once that exceeds `original_max_positions` (NTK-aware, as in transformers' `dynamic`)."""

    factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): high frequencies kept, low ones divided by `factor`, cos and sin multiplied."""

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Round the bounds of the ramp to whole pairs, as the paper's code does."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequency-dependent RoPE scaling of Llama 3.1 (its reference code, `apply_scaling`)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class PairScaling:
    """A divisor for the frequency of each pair, which GGUF files of Llama 3.1 carry instead of its parameters."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | PairScaling


class RopeParameters(BaseModel):
    """`rope_scaling` of config.json, or `rope_parameters`, which is what transformers 5 calls it."""

    model_config = ConfigDict(extra="ignore")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    truncate: bool | None = None
    pair_factors: Annotated[list[Positive], Field(min_length=1, max_length=1024)] | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


SERVED_KINDS = ("linear", "dynamic", "yarn", "llama3")


def parse_scaling(rope: RopeParameters, max_positions: int, file: str) -> RopeScaling | None:
    """What `rope` asks for; None: nothing. max_positions: the config's max_position_embeddings. Raises ModelError, which names `file`."""
    original = rope.original_max_position_embeddings
    if rope.kind == "default":
        return None
    if rope.kind == "pairs" and rope.pair_factors is not None:
        return PairScaling(tuple(rope.pair_factors))
    if rope.kind not in SERVED_KINDS:
        served = ", ".join(SERVED_KINDS)
        raise ModelError(f"{file}: rope_scaling: type {shorten(rope.kind)} is not served: use a model with {served} scaling or none")
    if rope.kind == "llama3":
        return _llama3(rope, file)
    factor = rope.factor
    if factor is None and rope.kind == "yarn" and original is not None:
        factor = max(1.0, max_positions / original)
    if factor is None:
        raise ModelError(f"{file}: rope_scaling: {rope.kind} needs factor: use the config.json that belongs to the weights")
    if rope.kind == "linear":
        return LinearScaling(factor)
    if rope.kind == "dynamic":
        return DynamicScaling(factor, max_positions)
    return _yarn(rope, factor, original or max_positions, file)


def served_positions(scaling: RopeScaling | None, max_positions: int) -> int:
    """Tokens that the model takes with its scaling; max_positions: the config's max_position_embeddings.

    For linear and dynamic scaling config.json may give the length before or after it: the longer reading is taken, as vLLM does; a
    pool's maxModelLength can be lower.
    """
    if isinstance(scaling, LinearScaling | DynamicScaling):
        return round(max_positions * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return max(max_positions, round(scaling.original_max_positions * scaling.factor))
    return max_positions


def _llama3(rope: RopeParameters, file: str) -> Llama3Scaling:
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    if factor is None or low is None or high is None or original is None:
        raise ModelError(
            f"{file}: rope_scaling: llama3 needs factor, low_freq_factor, high_freq_factor and original_max_position_embeddings: "
            "use the config.json that belongs to the weights"
        )
    if low >= high:
        raise ModelError(f"{file}: rope_scaling: low_freq_factor {low} is not below high_freq_factor {high}: correct one of them")
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: RopeParameters, factor: float, original: int, file: str) -> YarnScaling:
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if slow > fast:
        raise ModelError(f"{file}: rope_scaling: beta_slow {slow} is above beta_fast {fast}: correct one of them")
    attention = rope.attention_factor
    if attention is None:
        # The paper's 0.1 ln(s) + 1; DeepSeek's configurations scale both sides of the product and ask for the ratio.
        attention = _magnitude(factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            attention = _magnitude(factor, rope.mscale) / _magnitude(factor, rope.mscale_all_dim)
    return YarnScaling(factor, original, attention, fast, slow, True if rope.truncate is None else rope.truncate)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
