"""Chooses one variant of every operation, once, at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from npufleet_kernels import (
    attention,
    attention_cpu,
    attention_input,
    attention_int8,
    attention_output,
    feed_forward,
    gelu,
    kv_write,
    kv_write_int8,
    kv_write_pair,
    layer,
    layer_norm,
    linear,
    linear_float32,
    linear_int8,
    moe_experts,
    moe_experts_int8,
    moe_route,
    native,
    rms_norm,
    rope,
    silu_mul,
)
from npufleet_kernels.errors import VariantMissingError
from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.layer_step import Attention, LayerStep, Store
from npufleet_kernels.npu import attention as npu_attention
from npufleet_kernels.npu import kv_write_pair as npu_kv_write_pair
from npufleet_kernels.npu import operations as npu
from npufleet_kernels.weights import LayerWeights

logger = logging.getLogger(__name__)


class Linear(Protocol):
    """See `linear.reference`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class LinearFloat32(Protocol):
    """See `linear_float32.reference`."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


class LinearInt8(Protocol):
    """See `linear_int8.reference`."""

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor: ...


class RmsNorm(Protocol):
    """See `rms_norm.reference`."""

    def __call__(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]: ...


class LayerNorm(Protocol):
    """See `layer_norm.reference`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, residual: Tensor | None = None) -> Tensor: ...


class Rope(Protocol):
    """See `rope.reference`."""

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...


class SiluMul(Protocol):
    """See `silu_mul.reference`."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class Gelu(Protocol):
    """See `gelu.reference`."""

    def __call__(self, x: Tensor, cubic: bool) -> Tensor: ...


class MoeRoute(Protocol):
    """See `moe_route.reference`."""

    def __call__(self, scores: Tensor, experts_per_token: int, normalise: bool) -> tuple[Tensor, Tensor]: ...


class MoeExperts(Protocol):
    """See `moe_experts.reference`."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor: ...


class MoeExpertsInt8(Protocol):
    """See `moe_experts_int8.reference`."""

    def __call__(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
    ) -> Tensor: ...


class KvWrite(Protocol):
    """See `kv_write.reference`."""

    def __call__(self, rows: Tensor, slots: Tensor, new: Tensor) -> None: ...


class KvWriteInt8(Protocol):
    """See `kv_write_int8.reference`."""

    def __call__(self, rows: Tensor, scales: Tensor, slots: Tensor, new: Tensor) -> None: ...


class KvWritePair(Protocol):
    """See `kv_write_pair.reference`."""

    def __call__(self, kernels: Kernels, key_rows: Tensor, value_rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...


class AttentionInput(Protocol):
    """See `attention_input.reference`."""

    def __call__(
        self, kernels: Kernels, x: Tensor, residual: Tensor | None, weights: LayerWeights, step: LayerStep, store: Store
    ) -> tuple[Tensor, Sequence[HeadGroup], Tensor]: ...


class AttentionOutput(Protocol):
    """See `attention_output.reference`."""

    def __call__(self, kernels: Kernels, query: Tensor, groups: Sequence[HeadGroup], weights: LayerWeights, step: LayerStep) -> Tensor: ...


class AttentionInt8(Protocol):
    """See `attention_int8.reference`."""

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        key_scales: Sequence[Tensor],
        values: Sequence[Tensor],
        value_scales: Sequence[Tensor],
        query_lengths: Sequence[int],
        scale: float,
        causal: bool = True,
    ) -> Tensor: ...


class FeedForward(Protocol):
    """See `feed_forward.reference`."""

    def __call__(self, kernels: Kernels, x: Tensor, residual: Tensor, weights: LayerWeights, step: LayerStep) -> tuple[Tensor, Tensor]: ...


class Layer(Protocol):
    """See `layer.reference`."""

    def __call__(
        self, kernels: Kernels, x: Tensor, residual: Tensor | None, weights: LayerWeights, step: LayerStep, store: Store
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen operations, and the name of the variant behind each.

    The composites, `layer` and its parts, are given the operations that they are composed of.
    """

    linear: Linear
    linear_float32: LinearFloat32
    linear_int8: LinearInt8
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    rope: Rope
    silu_mul: SiluMul
    gelu: Gelu
    moe_route: MoeRoute
    moe_experts: MoeExperts
    moe_experts_int8: MoeExpertsInt8
    kv_write: KvWrite
    kv_write_int8: KvWriteInt8
    kv_write_pair: KvWritePair
    attention_int8: AttentionInt8
    attention_full: Attention
    attention_two_phase: Attention
    attention_blocked: Attention
    attention_input: AttentionInput
    attention_output: AttentionOutput
    feed_forward: FeedForward
    layer: Layer
    variants: Mapping[str, str]
    packs_weights: bool = False
    """Whether the compiled CPU kernels take part: linear layers packed by `native`, all layers in one call by `stack_cpu`."""

    def at_level(self, level: int) -> Kernels:
        """The same with composites up to a level: 1 pairs of operators only, 2 half layers, 3 whole layers."""
        if level >= 3:
            return self
        if level == 2:
            return replace(self, layer=layer.reference)
        return replace(
            self,
            layer=layer.reference,
            attention_input=attention_input.reference,
            attention_output=attention_output.reference,
            feed_forward=feed_forward.reference,
        )


VARIANTS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "linear": {"reference": linear.reference},
    "linear_float32": {"reference": linear_float32.reference},
    "linear_int8": {"reference": linear_int8.reference, "npu": npu.linear_int8, "npu_w8a8": npu.linear_int8_w8a8},
    "rms_norm": {"reference": rms_norm.reference, "npu": npu.rms_norm},
    "layer_norm": {"reference": layer_norm.reference, "npu": npu.layer_norm},
    "rope": {"reference": rope.reference, "npu": npu.rope},
    "silu_mul": {"reference": silu_mul.reference, "npu": npu.silu_mul},
    "gelu": {"reference": gelu.reference, "npu": npu.gelu},
    "moe_route": {"reference": moe_route.reference},
    "moe_experts": {"reference": moe_experts.reference},
    "moe_experts_int8": {"reference": moe_experts_int8.reference},
    "kv_write": {"reference": kv_write.reference},
    "kv_write_int8": {"reference": kv_write_int8.reference, "npu": npu.kv_write_int8},
    "kv_write_pair": {"reference": kv_write_pair.reference, "npu": npu_kv_write_pair.write},
    "attention_int8": {"reference": attention_int8.reference, "blocked": attention_int8.blocked, "npu": npu_attention.attend_int8},
    "attention_full": {"reference": attention.full, "cpu": attention_cpu.full, "npu": npu_attention.attend},
    "attention_two_phase": {"reference": attention.two_phase, "cpu": attention_cpu.two_phase, "npu": npu_attention.attend},
    "attention_blocked": {"reference": attention.blocked, "cpu": attention_cpu.blocked, "npu": npu_attention.attend},
    "attention_input": {"reference": attention_input.reference},
    "attention_output": {"reference": attention_output.reference},
    "feed_forward": {"reference": feed_forward.reference},
    "layer": {"reference": layer.reference},
}

PREFERENCE: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "blocked", "reference"),
    "npu": ("npu", "triton", "blocked", "reference"),
}
"""Variants by device type, best first."""


def select_kernels(device_type: str, overrides: Mapping[str, str] | None = None) -> Kernels:
    """Choose the best variant of each operation for `device_type` ("cpu" or "npu") and log the choice.

    overrides maps operations to variants that must be used; then the compiled CPU kernels, which are several operations at once, are left
    out. Raises VariantMissingError for an unknown device, operation or variant, BuildError where compiled kernels are wanted and cannot be
    made.
    """
    overrides = overrides or {}
    if device_type not in PREFERENCE:
        raise VariantMissingError(f"no kernels for device type {device_type!r}: use one of {', '.join(PREFERENCE)}")
    unknown = sorted(set(overrides) - set(VARIANTS))
    if unknown:
        raise VariantMissingError(f"no operation called {unknown[0]!r}: use one of {', '.join(VARIANTS)}")
    chosen = {operation: _choose(operation, device_type, overrides.get(operation)) for operation in VARIANTS}
    packs = device_type == "cpu" and not overrides and native.available()
    compiled = native.choose() if packs else "none"
    logger.info("kernels chosen", extra={"device": device_type, "variants": chosen, "compiled_for": compiled})
    return Kernels(**{operation: VARIANTS[operation][name] for operation, name in chosen.items()}, variants=chosen, packs_weights=packs)


def _choose(operation: str, device_type: str, wanted: str | None) -> str:
    available = VARIANTS[operation]
    candidates = (wanted,) if wanted else PREFERENCE[device_type]
    for name in candidates:
        if name in available:
            return name
    raise VariantMissingError(f"{operation} has no variant {' or '.join(candidates)}: it has {', '.join(available)}")
