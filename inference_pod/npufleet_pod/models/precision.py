"""Which type each part of a model is held and computed in: a plan, made once from the settings. Imports no torch.

Weights are rounded, or quantised, as they are loaded. Activations change their type only where one role hands over to another: on the way
into a role's first projection and out of its last. Weights in INT8 are multiplied with activations in the engine's type, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from npufleet_api.calibration import Int8KvHeads
from npufleet_api.model import Dtype
from npufleet_api.precision import KvCacheDtype, WeightDtype
from npufleet_api.settings import LayerPrecisionSettings, PrecisionSettings
from npufleet_pod.errors import SettingsError
from npufleet_pod.models.config import DecoderConfig

DTYPE_BYTES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}
SCALE_BYTES = 4
"""An INT8 key or value has a float32 scale per token and head."""


@dataclass(frozen=True, slots=True)
class RolePrecision:
    """Types of one role's weights and of what is computed with them; neither is Auto."""

    weights: WeightDtype
    compute: Dtype

    @property
    def int8(self) -> bool:
        """Whether the weights are quantised."""
        return self.weights is WeightDtype.INT8


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """One layer. `int8_kv_heads` are those of its KV heads that are cached as INT8, in order."""

    attention: RolePrecision
    feed_forward: RolePrecision
    int8_kv_heads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """A whole model, or one rank's part of it.

    dtype: the engine's: embedding, norms and what layers add up. Attention is computed in one type in all layers, that of the KV cache.
    """

    dtype: Dtype
    layers: tuple[LayerPrecision, ...]
    output: RolePrecision

    @property
    def kv_dtype(self) -> Dtype:
        """Type of keys and values that are not INT8."""
        return self.layers[0].attention.compute

    @property
    def int8_kv_heads(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer."""
        return tuple(layer.int8_kv_heads for layer in self.layers)

    def kv_bytes_per_token(self, kv_heads: int, head_size: int) -> int:
        """Bytes that keys and values of all layers take for one token, where a layer has `kv_heads` of them."""
        quantised = sum(len(heads) for heads in self.int8_kv_heads)
        floats = len(self.layers) * kv_heads - quantised
        return 2 * (floats * head_size * DTYPE_BYTES[self.kv_dtype] + quantised * (head_size + SCALE_BYTES))

    def describe(self) -> dict[str, str]:
        """What people read in the log."""
        kept = sum(len(heads) for heads in self.int8_kv_heads)
        return {
            "attention": _runs([layer.attention.weights for layer in self.layers]),
            "feed_forward": _runs([layer.feed_forward.weights for layer in self.layers]),
            "output": f"{self.output.weights.value}, computed in {self.output.compute.value}",
            "kv_cache": f"{self.kv_dtype.value}, {kept} heads in Int8",
        }

    def for_heads(self, kv_heads: Sequence[int]) -> PrecisionPlan:
        """The plan of a rank that holds these of the model's KV heads, numbered from 0 on in this order."""
        layers = (
            replace(layer, int8_kv_heads=tuple(own for own, head in enumerate(kv_heads) if head in layer.int8_kv_heads))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))


def _runs(types: Sequence[WeightDtype]) -> str:
    """One type, or each with the layers that have it: `Int8, BFloat16 in 0-1`, the most frequent first and without its layers."""
    usual = max(dict.fromkeys(types), key=types.count)
    others = []
    for kind, run in groupby(range(len(types)), key=lambda index: types[index]):
        indices = list(run)
        if kind is not usual:
            others.append(f"{kind.value} in {indices[0]}" + (f"-{indices[-1]}" if len(indices) > 1 else ""))
    return ", ".join([usual.value, *others])


def plan_precision(settings: PrecisionSettings, dtype: Dtype, config: DecoderConfig, chosen: Int8KvHeads | None = None) -> PrecisionPlan:
    """The plan that `settings` ask for, with the heads that a calibration chose. dtype: the engine's, not Auto.

    Auto is the engine's type; the output's scores are summed in float32 even then. Raises SettingsError.
    """
    whole = LayerPrecision(_role(settings.attention, dtype), _role(settings.feed_forward, dtype))
    heads = _int8_heads(settings.kv_cache, config, chosen)
    layers = [replace(whole, int8_kv_heads=heads[index]) for index in range(config.layers)]
    for number, part in enumerate(settings.layers):
        _apply(layers, part, f"precision.layers.{number}", dtype)
    return PrecisionPlan(dtype=dtype, layers=tuple(layers), output=_output(settings.output, dtype))


def uniform_precision(dtype: Dtype, config: DecoderConfig) -> PrecisionPlan:
    """Everything in one type."""
    return plan_precision(PrecisionSettings(), dtype, config)


def _apply(layers: list[LayerPrecision], part: LayerPrecisionSettings, field: str, dtype: Dtype) -> None:
    if part.last >= len(layers):
        raise SettingsError(f"{field}.last: {part.last} is beyond the model's {len(layers)} layers, counted from 0: lower it")
    for index in range(part.first, part.last + 1):
        layer = layers[index]
        if part.attention is not None:
            attention = _role(part.attention, dtype)
            if attention.compute is not layer.attention.compute:
                raise SettingsError(
                    f"{field}.attention: {part.attention.value} is computed in {attention.compute.value}, attention of the other layers "
                    f"and the KV cache in {layer.attention.compute.value}: set precision.attention for all layers, or Int8 here"
                )
            layer = replace(layer, attention=attention)
        if part.feed_forward is not None:
            layer = replace(layer, feed_forward=_role(part.feed_forward, dtype))
        layers[index] = layer


def _role(wanted: WeightDtype, dtype: Dtype) -> RolePrecision:
    if wanted is WeightDtype.AUTO:
        return RolePrecision(WeightDtype(dtype), dtype)
    return RolePrecision(wanted, dtype if wanted is WeightDtype.INT8 else Dtype(wanted))


def _output(wanted: WeightDtype, dtype: Dtype) -> RolePrecision:
    if wanted in (WeightDtype.AUTO, WeightDtype.INT8):
        return replace(_role(wanted, dtype), compute=Dtype.FLOAT32)
    return _role(wanted, dtype)


def _int8_heads(wanted: KvCacheDtype, config: DecoderConfig, chosen: Int8KvHeads | None) -> Sequence[tuple[int, ...]]:
    if wanted is KvCacheDtype.AUTO:
        return [()] * config.layers
    if wanted is KvCacheDtype.INT8:
        return [tuple(range(config.kv_heads))] * config.layers
    if chosen is None:
        raise SettingsError(
            "precision.kvCache: Int8Heads needs a calibration that chose heads: run npufleet-pod calibrate and set calibrationPath, "
            "or choose Int8"
        )
    if len(chosen.layers) != config.layers:
        raise SettingsError(
            f"calibration: int8KvHeads has {len(chosen.layers)} layers, the model {config.layers}: calibrate this model, or choose Int8"
        )
    beyond = [head for heads in chosen.layers for head in heads if head >= config.kv_heads]
    if beyond:
        raise SettingsError(
            f"calibration: int8KvHeads names head {beyond[0]}, the model has {config.kv_heads}: calibrate this model, or choose Int8"
        )
    return [tuple(heads) for heads in chosen.layers]
