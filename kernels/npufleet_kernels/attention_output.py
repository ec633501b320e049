"""Second part of a decoder layer: attention and its output projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from npufleet_kernels.layer_step import LayerStep
from npufleet_kernels.weights import LayerWeights

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(
    kernels: Kernels, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], weights: LayerWeights, step: LayerStep
) -> Tensor:
    """One operation after the other. query: (T, H, D); keys, values: one (K, L, D) per sequence. Returns (T, hidden)."""
    mixed = attend(step, query, keys, values)
    return step.add_ranks(step.project(mixed.reshape(query.shape[0], -1), weights.output))


def attend(step: LayerStep, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of each part of the batch by its strategy: (T, H, D)."""
    scale = query.shape[-1] ** -0.5
    if len(step.parts) == 1:
        return step.parts[0].attention(query, keys, values, step.query_lengths, scale)
    mixed, first, row = [], 0, 0
    for part in step.parts:
        sequences = slice(first, first + part.sequences)
        lengths = step.query_lengths[sequences]
        rows = slice(row, row + sum(lengths))
        mixed.append(part.attention(query[rows], keys[sequences], values[sequences], lengths, scale))
        first, row = sequences.stop, rows.stop
    return torch.cat(mixed)
