"""Second part of a decoder layer: attention and its output projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.layer_step import LayerStep
from npufleet_kernels.weights import LayerWeights

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(kernels: Kernels, query: Tensor, groups: Sequence[HeadGroup], weights: LayerWeights, step: LayerStep) -> Tensor:
    """One operation after the other. query: (T, H, D), its heads in the order of `groups`. Returns (T, hidden)."""
    mixed = attend(kernels, step, query, groups)
    return step.add_ranks(step.project(mixed.reshape(query.shape[0], -1), weights.output))


def attend(kernels: Kernels, step: LayerStep, query: Tensor, groups: Sequence[HeadGroup]) -> Tensor:
    """Attention of each group of heads: (T, H, D)."""
    if len(groups) == 1:
        return _attend_group(kernels, step, query, groups[0])
    per_head = query.shape[1] // sum(group.kv_heads for group in groups)
    parts = torch.split(query, [group.kv_heads * per_head for group in groups], dim=1)
    # The kernels take a query's heads end to end.
    return torch.cat([_attend_group(kernels, step, part.contiguous(), group) for part, group in zip(parts, groups, strict=True)], dim=1)


def _attend_group(kernels: Kernels, step: LayerStep, query: Tensor, group: HeadGroup) -> Tensor:
    """INT8 heads have one operation, whose scratch memory no length lets grow; of others each part of the batch has its strategy."""
    scale, keys, values = query.shape[-1] ** -0.5, group.keys, group.values
    if group.key_scales is not None and group.value_scales is not None:
        return kernels.attention_int8(query, keys, group.key_scales, values, group.value_scales, step.query_lengths, scale)
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
