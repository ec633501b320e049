"""`calibration.yaml`: what `npufleet-pod calibrate` measured of one model on one kind of device, and chose from it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from npufleet_api.model import Dtype
from npufleet_api.settings import SettingsModel

MAX_LAYERS = 1024
FULL_TOKENS = 512
TWO_PHASE_TOKENS = 2048
"""Lengths up to which sequences are fused fully, and computed in two phases, until a calibration says otherwise."""
Label = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
HeadIndex = Annotated[int, Field(ge=0, le=65535)]


class CalibratedFor(SettingsModel):
    """What was measured: a calibration is of use for the same shapes on the same kind of device only."""

    architecture: Label
    layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    device: Label = Field(description="Kind of device, such as Ascend910B3 or the CPU's model.")
    dtype: Dtype
    tensor_parallel: int = Field(default=1, ge=1, le=64)


class AttentionPoint(SettingsModel):
    """Time of one attention strategy, of one layer, at one length."""

    strategy: Label = Field(description="Full, TwoPhase or Blocked.")
    tokens: Tokens = Field(description="Length of the sequence.")
    new_tokens: Tokens = Field(default=1, description="The last of them, which are computed: 1 for a next token, else a prompt's.")
    milliseconds: PositiveNumber


class FusionCalibration(SettingsModel):
    """Lengths at which one fusion strategy gives way to the next."""

    full_tokens: Tokens = Field(default=FULL_TOKENS, description="Sequences up to this length are fused fully.")
    two_phase_tokens: Tokens = Field(
        default=TWO_PHASE_TOKENS, description="Longer ones up to this are computed in two phases, those beyond in blocks."
    )
    points: list[AttentionPoint] = Field(default=[], max_length=4096)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.full_tokens > self.two_phase_tokens:
            raise ValueError(f"fullTokens: {self.full_tokens} is above twoPhaseTokens {self.two_phase_tokens}: calibrate again")
        return self


class BatchPoint(SettingsModel):
    """Decoding speed at one batch size."""

    sequences: Count
    tokens_per_second: PositiveNumber


class BatchCalibration(SettingsModel):
    """Sequences of a batch beyond which decoding hardly gets faster."""

    max_num_sequences: int = Field(ge=1, le=4096)
    points: list[BatchPoint] = Field(default=[], max_length=4096)


class Int8KvHeads(SettingsModel):
    """KV heads that are cached as INT8, chosen by what it costs."""

    layers: list[Annotated[list[HeadIndex], Field(max_length=65536)]] = Field(
        max_length=MAX_LAYERS, description="Heads of each layer, numbered over the whole model."
    )
    perplexity_loss_percent: Number = Field(description="Measured on the text of the calibration.")
    limit_percent: PositiveNumber = Field(description="Loss that was allowed.")

    @model_validator(mode="after")
    def _heads_once(self) -> Self:
        for index, heads in enumerate(self.layers):
            if sorted(set(heads)) != heads:
                raise ValueError(f"layers.{index}: {heads[:8]} does not list each head once and in order: calibrate again")
        return self


class Calibration(SettingsModel):
    """The whole file. What was not measured is left out."""

    made_for: CalibratedFor
    fusion: FusionCalibration | None = None
    batch: BatchCalibration | None = None
    int8_kv_heads: Int8KvHeads | None = None
