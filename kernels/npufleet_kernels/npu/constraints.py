"""How a call is refused before it is made: torch_npu's own checks see names and types, hardly ever shapes.

These run before every call of every layer, on the thread that feeds the device: a message is put together only where it is raised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_kernels.errors import UnsupportedCallError

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def require(condition: bool, operator: str, message: str) -> None:
    """Raise UnsupportedCallError unless `condition` holds. message: the argument, its value, and what the operator takes."""
    if not condition:
        raise UnsupportedCallError(f"{operator}: {message}")


def require_types(operator: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """All tensors have one and the same of the allowed types."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given.values()))
    if first in allowed and all(dtype is first for dtype in given.values()):
        return
    names = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
    require(len(set(given.values())) == 1, operator, f"{names}: the types must be equal")
    require(first in allowed, operator, f"{names}: it takes {', '.join(str(dtype) for dtype in allowed)}")


def require_filled(operator: str, **tensors: Tensor) -> None:
    """No tensor is empty."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise UnsupportedCallError(f"{operator}: {name} {tuple(tensor.shape)} is empty")


def require_shape(operator: str, name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    """A tensor has exactly this shape."""
    if tensor.shape != wanted:
        raise UnsupportedCallError(f"{operator}: {name} is {tuple(tensor.shape)}, it takes {wanted}")
