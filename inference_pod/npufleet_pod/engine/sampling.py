"""Chooses the next token of one sequence from its logits."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from npufleet_pod.engine.request import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature leave float32's range; the likeliest token is taken."""


def new_generator(seed: int) -> torch.Generator:
    """A source of random numbers of one request. It lives on the CPU, so that draws do not depend on the device."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    return generator


def forbid(logits: Tensor, token_ids: Collection[int]) -> Tensor:
    """A copy of `logits` (vocabulary,) in which `token_ids` cannot be chosen; ids beyond the vocabulary are ignored."""
    masked = logits.clone()
    masked[[token_id for token_id in token_ids if token_id < logits.shape[-1]]] = float("-inf")
    return masked


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """One token id. logits: (vocabulary,) float32. Depends only on its arguments, never on the rest of the batch.

    The order is vLLM's: temperature, then min_p, top_k, top_p on what is left. Exactly one number is drawn.
    """
    if params.greedy or params.temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    scaled = logits.to(device="cpu", dtype=torch.float32) / params.temperature
    values, order = scaled.sort(descending=True, stable=True)
    probabilities = values.softmax(-1)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if params.min_p > 0:
        keep &= probabilities >= params.min_p * probabilities[0]
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1:
        kept = torch.where(keep, probabilities, 0.0)
        kept = kept / kept.sum()
        keep &= kept.cumsum(-1) - kept < params.top_p
    keep[0] = True
    cumulative = torch.where(keep, probabilities, 0.0).double().cumsum(-1)
    draw = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, draw, right=True))
    # Rounding may carry the draw past the last kept token.
    return int(order[min(index, int(keep.nonzero()[-1]))])
