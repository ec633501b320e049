"""Rotary frequencies of a configuration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npufleet_pod.models.config import DecoderConfig, Llama3Scaling


def inverse_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Angle per position of each pair of a head, float32, (head_size / 2,)."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of `positions` (T,) int64: each (T, head_size) in `dtype`, both halves equal; the angles are taken in float32."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    share = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    smooth = (1 - share) * frequencies / scaling.factor + share * frequencies
    scaled = torch.where(turns < scaling.low_frequency_factor, frequencies / scaling.factor, smooth)
    return torch.where(turns > scaling.high_frequency_factor, frequencies, scaled)
