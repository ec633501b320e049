"""The experts of a mixture-of-experts layer: each a gated feed-forward layer of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_kernels import silu_mul


def reference(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over a token's experts of `weight · down(silu(gate) · up)`.

    x: (T, hidden), any float dtype. weights, experts: (T, k), from `moe_route.reference`. gate_up: (E, 2 · intermediate, hidden), the gate
    first. down: (E, hidden, intermediate). Returns (T, hidden) in x's dtype. A token's experts are added in the order of their number, so
    that the sum does not depend on the other tokens.
    """
    output = torch.zeros_like(x)
    order = torch.argsort(experts.flatten(), stable=True)
    tokens = torch.div(order, experts.shape[1], rounding_mode="floor")
    shares = weights.flatten()[order].unsqueeze(1)
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            inner = silu_mul.reference(torch.nn.functional.linear(x[tokens[rows]], gate_up[expert]))
            output.index_add_(0, tokens[rows], torch.nn.functional.linear(inner, down[expert]) * shares[rows])
            start += count
    return output
