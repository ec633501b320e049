"""What all layers of a step share, for composite operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.weights import Project, Projection


class Attention(Protocol):
    """See `attention.full`."""

    def __call__(
        self,
        query: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        query_lengths: Sequence[int],
        scale: float,
        causal: bool = True,
    ) -> Tensor: ...


Store = Callable[[Tensor, Tensor], Sequence[HeadGroup]]
"""Writes a layer's new keys and values, each (T, K, D); returns all of the layer's, in groups of heads."""
MixExperts = Callable[[Tensor, Tensor, Tensor, Projection, Projection], Tensor]
"""`moe_experts` of x, weights, experts, gate_up and down, the last two as their loader keeps them."""


def _itself(output: Tensor) -> Tensor:
    return output


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Sequences that follow each other in the batch and are computed by one strategy."""

    attention: Attention
    sequences: int


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A batch and the model's shape, or a rank's part of it.

    rotation: (cos, sin) of `rope`. query_lengths: new tokens of each sequence. add_ranks: sums (T, hidden) over the ranks of a model,
    since attention and feed-forward part of one rank give a share of their output.
    """

    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    rotation: tuple[Tensor, Tensor]
    query_lengths: Sequence[int]
    parts: Sequence[AttentionPart]
    project: Project
    mix_experts: MixExperts
    add_ranks: Callable[[Tensor], Tensor] = _itself
    experts_per_token: int = 0
    normalise_experts: bool = False
