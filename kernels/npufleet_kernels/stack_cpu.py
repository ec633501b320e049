"""All layers of a decoder in one call, by the compiled CPU kernels.

Within it each layer is seven parts that threads share out: norm, QKV, rotation with the write to the cache, attention, output with the
residual, gate and up with their product, down with the residual. What layers add up is kept in float32; activations are rounded only
where a product takes them in bfloat16. Sums run in one order whatever the batch, so that a token's result depends on no other sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npufleet_kernels.native import PackedLinear, new_stack
from npufleet_kernels.paged import PagedStep

PARTS = ("norm", "qkv", "rotate_and_write", "attention", "output", "gate_up", "down")
"""Parts of a layer, as `take_profile` tells their times."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """A decoder, or a rank's part of it. narrow: activations are multiplied in bfloat16 where the CPU can, else in float32."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    epsilon: float
    narrow: bool


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Norms in any float type, those of heads (D,) or None; gate_up in two segments."""

    input_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class CpuStack:
    """Layers with packed weights, which it shares with whoever made them."""

    def __init__(self, shape: StackShape, layers: Sequence[StackLayer], norm: Tensor) -> None:
        """norm: the last one, (hidden,)."""
        self._norm = _wide(norm)
        self._stack: Any = new_stack(
            shape.hidden, shape.heads, shape.kv_heads, shape.head_size, shape.intermediate, shape.epsilon, shape.narrow
        )
        for layer in layers:
            tensors = [_wide(layer.input_norm), *_parts(layer.qkv), _wide(layer.query_norm), _wide(layer.key_norm), *_parts(layer.output)]
            self._stack.add_layer([*tensors, _wide(layer.mlp_norm), *_parts(layer.gate_up), *_parts(layer.down)])

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], query_lengths: Sequence[int], step: PagedStep, profile: bool = False
    ) -> Tensor:
        """Hidden states after the last norm, (T, hidden) in hidden's type; new keys and values are written to the cache.

        hidden: (T, hidden) float32 or bfloat16. rotation: (cos, sin) of `rope` in float32. profile: count the time of each part.
        """
        output: Tensor = self._stack.forward(
            hidden,
            *rotation,
            step.tensors,
            step.groups,
            step.new_slots,
            query_lengths,
            step.lengths,
            step.first_slots,
            step.scattered,
            self._norm,
            torch.get_num_threads(),
            profile,
        )
        return output

    def take_profile(self) -> dict[str, float]:
        """Seconds of each part over all layers, of the profiled steps since the last call."""
        return dict(zip(PARTS, self._stack.take_profile(), strict=True))


def _wide(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.to(torch.float32).contiguous()


def _parts(linear: PackedLinear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return linear.panels, linear.scale, linear.bias
