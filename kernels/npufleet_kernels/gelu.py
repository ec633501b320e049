"""Gaussian error linear unit of encoders' feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, cubic: bool) -> Tensor:
    """`x · Φ(x)` (Hendrycks & Gimpel 2016, arXiv:1606.08415), any shape and float dtype; returns the same.

    cubic: Φ by the paper's polynomial, ½ (1 + tanh(√(2/π) (x + 0.044715 x³))), which checkpoints call gelu_new or gelu_pytorch_tanh;
    else by the error function.
    """
    return torch.nn.functional.gelu(x, approximate="tanh" if cubic else "none")
