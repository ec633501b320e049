"""Makes one vector of a prompt's hidden states while they are computed, in whatever chunks and however often."""

from __future__ import annotations

import torch
from torch import Tensor

from npufleet_pod.engine.request import Pooling


class PooledPrompt:
    """Collects hidden states up to the prompt's end."""

    def __init__(self, pooling: Pooling, prompt_tokens: int) -> None:
        self._pooling = pooling
        self._prompt_tokens = prompt_tokens
        self._counted = 0
        self._sum: Tensor | None = None

    def observe(self, start: int, hidden: Tensor) -> None:
        """Take hidden states (n, hidden) of the positions from `start`; those taken before, or beyond the prompt, are ignored."""
        first, last = max(start, self._counted), min(start + hidden.shape[0], self._prompt_tokens)
        if first >= last:
            return
        new = hidden[first - start : last - start].to(torch.float32)
        self._counted = last
        if self._pooling is Pooling.LAST:
            self._sum = new[-1]
        elif self._pooling is Pooling.FIRST:
            self._sum = new[0] if first == 0 else self._sum
        else:
            self._sum = new.sum(0) if self._sum is None else self._sum + new.sum(0)

    def vector(self) -> bytes:
        """The prompt's vector: little-endian float32, finite, not yet of length 1."""
        if self._sum is None:
            raise RuntimeError("no position of the prompt was observed")
        pooled = self._sum / self._counted if self._pooling is Pooling.MEAN else self._sum
        return torch.nan_to_num(pooled, posinf=0.0, neginf=0.0).cpu().numpy().astype("<f4").tobytes()
