"""Cosines and sines of a configuration's rotary positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npufleet_pod.models.config import DecoderConfig
from npufleet_pod.models.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, PairScaling, YarnScaling


class RotaryEmbedding:
    """Holds the angle per position of each pair of a head."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        scaling = config.rope_scaling
        self._theta = config.rope_theta
        self._exponents = torch.arange(0, config.rotary_size, 2, dtype=torch.float32, device=device) / config.rotary_size
        self._dynamic = scaling if isinstance(scaling, DynamicScaling) else None
        self._dynamic_power = config.rotary_size / max(config.rotary_size - 2, 1)
        self._magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        frequencies = 1.0 / (config.rope_theta**self._exponents)
        if isinstance(scaling, LinearScaling):
            frequencies = frequencies / scaling.factor
        elif isinstance(scaling, Llama3Scaling):
            frequencies = _scale_llama3(frequencies, scaling)
        elif isinstance(scaling, YarnScaling):
            frequencies = _scale_yarn(frequencies, scaling, config)
        elif isinstance(scaling, PairScaling):
            frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32, device=device)
        self.frequencies = frequencies

    def rotation(self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin) of `positions` (T,) int64: each (T, rotary_size) in `dtype`, both halves equal; the angles are taken in float32.

        lengths: (T,) int64, the length of sequence whose frequencies turn each token; read only where they depend on it (dynamic
        scaling). None: up to and with the token itself.
        """
        frequencies = self.frequencies
        if self._dynamic is not None:
            frequencies = self._dynamic_frequencies(self._dynamic, positions + 1 if lengths is None else lengths)
        angles = positions.to(torch.float32).unsqueeze(1) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._magnitude).to(dtype), (angles.sin() * self._magnitude).to(dtype)

    def _dynamic_frequencies(self, scaling: DynamicScaling, lengths: Tensor) -> Tensor:
        """(T, rotary_size / 2); transformers' `_compute_dynamic_ntk_parameters`, for each token its own length."""
        original = scaling.original_max_positions
        grown = scaling.factor * lengths.clamp(min=original) / original - (scaling.factor - 1)
        base = self._theta * grown**self._dynamic_power
        return 1.0 / (base.unsqueeze(1) ** self._exponents)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    share = (turns - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    smooth = (1 - share) * frequencies / scaling.factor + share * frequencies
    scaled = torch.where(turns < scaling.low_frequency_factor, frequencies / scaling.factor, smooth)
    return torch.where(turns > scaling.high_frequency_factor, frequencies, scaled)


def _scale_yarn(frequencies: Tensor, scaling: YarnScaling, config: DecoderConfig) -> Tensor:
    """Between the pairs that turn `beta_fast` and `beta_slow` times in the original length, from kept to divided (section 3.2)."""
    size, base = config.rotary_size, config.rope_theta

    def pair_that_turns(times: float) -> float:
        return size * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, size - 1.0)
    if low == high:
        high += 0.001
    pairs = torch.arange(size // 2, dtype=torch.float32, device=frequencies.device)
    divided = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * divided + frequencies * (1 - divided)
