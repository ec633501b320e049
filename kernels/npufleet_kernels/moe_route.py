"""Chooses the experts of each token in a mixture-of-experts layer."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(scores: Tensor, experts_per_token: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The `experts_per_token` experts of the largest softmax probability (Fedus et al. 2021, arXiv:2101.03961, with more than one expert).

    scores: (T, experts), any float dtype; the softmax is taken in float32. normalise: make a token's weights add up to 1.
    Returns (weights (T, experts_per_token) in scores' dtype, experts (T, experts_per_token) int64), the largest first.
    """
    weights, experts = torch.softmax(scores.to(torch.float32), dim=-1).topk(experts_per_token, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), experts
