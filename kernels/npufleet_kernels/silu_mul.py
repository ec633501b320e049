"""Gated activation of the Llama family's feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (SwiGLU; Shazeer 2020, arXiv:2002.05202).

    gate_up: (T, 2 · intermediate), the gate first, any float dtype. Returns (T, intermediate) in the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
