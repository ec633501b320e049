"""The experts of a mixture-of-experts layer: each a gated feed-forward layer of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npufleet_kernels import silu_mul


def reference(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over a token's experts of `weight · down(silu(gate) · up)`.

    x: (T, hidden), any float dtype. weights, experts: (T, k), from `moe_route.reference`. gate_up: (E, 2 · intermediate, hidden), the gate
    first. down: (E, hidden, intermediate). Returns (T, hidden) in x's dtype. A token's experts are added in the order of their number, so
    that the sum does not depend on the other tokens.
    """

    def feed_forward(expert: int, rows: Tensor) -> Tensor:
        inner = silu_mul.reference(torch.nn.functional.linear(rows, gate_up[expert]))
        return torch.nn.functional.linear(inner, down[expert])

    return sum_of_experts(x, weights, experts, gate_up.shape[0], feed_forward)


def sum_of_experts(x: Tensor, weights: Tensor, experts: Tensor, count: int, feed_forward: Callable[[int, Tensor], Tensor]) -> Tensor:
    """As `reference`, with `feed_forward(expert, rows)`, (n, hidden) to (n, hidden), for each of `count` experts that any token has."""
    output = torch.zeros_like(x)
    order = torch.argsort(experts.flatten(), stable=True)
    tokens = torch.div(order, experts.shape[1], rounding_mode="floor")
    shares = weights.flatten()[order].unsqueeze(1)
    start = 0
    for expert, size in enumerate(torch.bincount(experts.flatten(), minlength=count).tolist()):
        if size:
            rows = slice(start, start + size)
            output.index_add_(0, tokens[rows], feed_forward(expert, x[tokens[rows]]) * shares[rows])
            start += size
    return output
