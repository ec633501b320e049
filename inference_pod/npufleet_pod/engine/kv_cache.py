"""Keys and values of one sequence, in one region that grows by whole blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_pod.models.config import DecoderConfig

BLOCK_TOKENS = 64
"""Tokens by which a cache grows; what the scheduler counts is what is allocated."""


class GrowingKVCache:
    """KV of one sequence: (layers, 2, K, capacity, D), so that a head's keys lie together."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._region = torch.empty((config.layers, 2, config.kv_heads, 0, config.head_size), dtype=dtype, device=device)
        self._length = 0
        self._pending = 0

    @property
    def length(self) -> int:
        """Tokens stored by finished steps."""
        return self._length

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more, which the layers append next."""
        self._pending = tokens
        needed = -(-(self._length + tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
        layers, two, heads, capacity, size = self._region.shape
        if needed > capacity:
            grown = self._region.new_empty((layers, two, heads, needed, size))
            grown[:, :, :, : self._length] = self._region[:, :, :, : self._length]
            self._region = grown

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new keys and values, each (n, K, D); return all of the layer's, each a (K, L, D) view."""
        end = self._length + self._pending
        region = self._region[layer]
        region[0, :, self._length : end] = keys.transpose(0, 1)
        region[1, :, self._length : end] = values.transpose(0, 1)
        return region[0, :, :end], region[1, :, :end]

    def commit(self) -> None:
        """Count the reserved tokens as stored, once every layer has appended them."""
        self._length += self._pending
        self._pending = 0
