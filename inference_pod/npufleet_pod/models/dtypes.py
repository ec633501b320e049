"""torch's names of the settings' types."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from npufleet_api.model import Dtype

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


def dtype_of(dtype: torch.dtype) -> Dtype:
    """The settings' name of a type."""
    return next(name for name, known in TORCH_DTYPES.items() if known is dtype)
