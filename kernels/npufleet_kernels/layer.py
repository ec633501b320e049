"""A whole decoder layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from npufleet_kernels.layer_step import LayerStep, Store
from npufleet_kernels.weights import LayerWeights

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(
    kernels: Kernels, x: Tensor, residual: Tensor | None, weights: LayerWeights, step: LayerStep, store: Store
) -> tuple[Tensor, Tensor]:
    """Its three parts, one after the other. x: (T, hidden); residual: (T, hidden), or None in the first layer.

    Returns the layer's output, not yet added to the residual, and the residual, both (T, hidden).
    """
    query, groups, residual = kernels.attention_input(kernels, x, residual, weights, step, store)
    mixed = kernels.attention_output(kernels, query, groups, weights, step)
    return kernels.feed_forward(kernels, mixed, residual, weights, step)
