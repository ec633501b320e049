"""Last part of a decoder layer: norm with residual, and the gated feed-forward part or the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from npufleet_kernels.layer_step import LayerStep
from npufleet_kernels.weights import ExpertWeights, GatedWeights, LayerWeights

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(kernels: Kernels, x: Tensor, residual: Tensor, weights: LayerWeights, step: LayerStep) -> tuple[Tensor, Tensor]:
    """One operation after the other. x, residual: (T, hidden). Returns the part's output and the next residual, both (T, hidden)."""
    normed, residual = kernels.rms_norm(x, weights.mlp_norm, step.epsilon, residual)
    mlp = weights.mlp
    output = _experts(kernels, normed, mlp, step) if isinstance(mlp, ExpertWeights) else _gated(kernels, normed, mlp, step)
    return step.add_ranks(output), residual


def _gated(kernels: Kernels, x: Tensor, weights: GatedWeights, step: LayerStep) -> Tensor:
    return step.project(kernels.silu_mul(step.project(x, weights.gate_up)), weights.down)


def _experts(kernels: Kernels, x: Tensor, weights: ExpertWeights, step: LayerStep) -> Tensor:
    shares, experts = kernels.moe_route(step.project(x, weights.router), step.experts_per_token, step.normalise_experts)
    mixed = step.mix_experts(x, shares, experts, weights.gate_up, weights.down)
    if weights.shared is None or weights.shared_gate is None:
        return mixed
    return mixed + torch.sigmoid(step.project(x, weights.shared_gate)) * _gated(kernels, x, weights.shared, step)
