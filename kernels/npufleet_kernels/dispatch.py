"""Chooses one variant of every operation, once, at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from npufleet_kernels import attention, gelu, layer_norm, linear, moe_experts, moe_route, rms_norm, rope, silu_mul
from npufleet_kernels.errors import VariantMissingError

logger = logging.getLogger(__name__)


class Linear(Protocol):
    """See `linear.reference`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


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


class Attention(Protocol):
    """See `attention.reference`."""

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        query_lengths: Sequence[int],
        scale: float,
        causal: bool = True,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chosen operations, and the name of the variant behind each."""

    linear: Linear
    rms_norm: RmsNorm
    layer_norm: LayerNorm
    rope: Rope
    silu_mul: SiluMul
    gelu: Gelu
    moe_route: MoeRoute
    moe_experts: MoeExperts
    attention: Attention
    variants: Mapping[str, str]


VARIANTS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "linear": {"reference": linear.reference},
    "rms_norm": {"reference": rms_norm.reference},
    "layer_norm": {"reference": layer_norm.reference},
    "rope": {"reference": rope.reference},
    "silu_mul": {"reference": silu_mul.reference},
    "gelu": {"reference": gelu.reference},
    "moe_route": {"reference": moe_route.reference},
    "moe_experts": {"reference": moe_experts.reference},
    "attention": {"reference": attention.reference, "blocked": attention.blocked, "cpu": attention.cpu},
}

PREFERENCE: Mapping[str, Sequence[str]] = {
    "cpu": ("cpu", "blocked", "reference"),
    "npu": ("npu", "triton", "blocked", "reference"),
}
"""Variants by device type, best first."""


def select_kernels(device_type: str, overrides: Mapping[str, str] | None = None) -> Kernels:
    """Choose the best variant of each operation for `device_type` ("cpu" or "npu") and log the choice.

    overrides maps operations to variants that must be used. Raises VariantMissingError for an unknown device, operation or variant.
    """
    overrides = overrides or {}
    if device_type not in PREFERENCE:
        raise VariantMissingError(f"no kernels for device type {device_type!r}: use one of {', '.join(PREFERENCE)}")
    unknown = sorted(set(overrides) - set(VARIANTS))
    if unknown:
        raise VariantMissingError(f"no operation called {unknown[0]!r}: use one of {', '.join(VARIANTS)}")
    chosen = {operation: _choose(operation, device_type, overrides.get(operation)) for operation in VARIANTS}
    logger.info("kernels chosen", extra={"device": device_type, "variants": chosen})
    return Kernels(**{operation: VARIANTS[operation][name] for operation, name in chosen.items()}, variants=chosen)


def _choose(operation: str, device_type: str, wanted: str | None) -> str:
    available = VARIANTS[operation]
    candidates = (wanted,) if wanted else PREFERENCE[device_type]
    for name in candidates:
        if name in available:
            return name
    raise VariantMissingError(f"{operation} has no variant {' or '.join(candidates)}: it has {', '.join(available)}")
