"""First part of a decoder layer: norm with residual, Q, K and V, their norms, rotation, and the write to the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from npufleet_kernels.head_groups import HeadGroup
from npufleet_kernels.layer_step import LayerStep, Store
from npufleet_kernels.weights import LayerWeights

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(
    kernels: Kernels, x: Tensor, residual: Tensor | None, weights: LayerWeights, step: LayerStep, store: Store
) -> tuple[Tensor, Sequence[HeadGroup], Tensor]:
    """One operation after the other. x: (T, hidden); residual: (T, hidden), or None in the first layer.

    Returns the rotated queries (T, H, D), what `store` gives, and the next residual (T, hidden).
    """
    normed, residual = kernels.rms_norm(x, weights.input_norm, step.epsilon, residual)
    heads = step.project(normed, weights.qkv).view(x.shape[0], step.heads + 2 * step.kv_heads, step.head_size)
    query, key, value = torch.split(heads, [step.heads, step.kv_heads, step.kv_heads], dim=1)
    if weights.query_norm is not None and weights.key_norm is not None:
        query = _norm_heads(kernels, query, weights.query_norm, step.epsilon)
        key = _norm_heads(kernels, key, weights.key_norm, step.epsilon)
    query, key = kernels.rope(query, key, *step.rotation)
    return query, store(key, value), residual


def _norm_heads(kernels: Kernels, heads: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    normed, _ = kernels.rms_norm(heads.reshape(-1, heads.shape[-1]), weight, epsilon)
    return normed.view(heads.shape)
