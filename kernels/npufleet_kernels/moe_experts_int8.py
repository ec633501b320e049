"""The experts of a mixture-of-experts layer with INT8 weights."""

from __future__ import annotations

from torch import Tensor

from npufleet_kernels import linear_int8, silu_mul
from npufleet_kernels.moe_experts import sum_of_experts


def reference(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor
) -> Tensor:
    """`moe_experts.reference` with `linear_int8` for each projection.

    gate_up: (E, 2 · intermediate, hidden) int8, gate_up_scale: (E, 2 · intermediate) float32. down: (E, hidden, intermediate) int8,
    down_scale: (E, hidden) float32. The rest as there.
    """

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        inner = silu_mul.reference(linear_int8.reference(rows, gate_up[expert], gate_up_scale[expert]))
        return linear_int8.reference(inner, down[expert], down_scale[expert])

    return sum_of_experts(x, weights, experts, gate_up.shape[0], feed_forward)
