"""Types of weights and KV, by role and layer."""

from __future__ import annotations

from enum import StrEnum

from npufleet_api.schema import LIST_ATOMIC, ApiModel, Change, cel, spec_field, validations


class WeightDtype(StrEnum):
    """Type of one role's weights; Auto is the engine's dtype, Int8 has a scale per output channel."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"
    INT8 = "Int8"


class KvCacheDtype(StrEnum):
    """Type of cached keys and values; Auto is the engine's dtype, Int8Heads keeps those heads as INT8 that a calibration chose."""

    AUTO = "Auto"
    INT8 = "Int8"
    INT8_HEADS = "Int8Heads"


class LayerPrecision(ApiModel):
    """Types of a run of layers, counted from 0. Unset fields are those of all layers."""

    first: int = spec_field("First layer.", Change.ROLLS, ge=0, le=1023)
    last: int = spec_field("Last layer.", Change.ROLLS, ge=0, le=1023)
    attention: WeightDtype | None = spec_field("Projections of attention.", Change.ROLLS, default=None)
    feed_forward: WeightDtype | None = spec_field("Feed-forward layers, experts included.", Change.ROLLS, default=None)


class PrecisionOverrides(ApiModel):
    """Types by role. Unset fields are Auto."""

    attention: WeightDtype | None = spec_field("Projections of attention.", Change.ROLLS, default=None)
    feed_forward: WeightDtype | None = spec_field("Feed-forward layers, experts included.", Change.ROLLS, default=None)
    output: WeightDtype | None = spec_field("The head that scores the vocabulary.", Change.ROLLS, default=None)
    kv_cache: KvCacheDtype | None = spec_field("Cached keys and values. Int8Heads needs calibrationRef.", Change.ROLLS, default=None)
    layers: list[LayerPrecision] = spec_field(
        "Layers that differ from the rest; of several that name a layer, the last counts.",
        Change.ROLLS,
        default=[],
        max_length=64,
        json_schema_extra={
            **LIST_ATOMIC,
            **validations(
                cel(
                    "self.all(l, l.first <= l.last)",
                    "engine.precision.layers has a first above its last: swap them",
                )
            ),
        },
    )
