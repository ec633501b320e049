"""Text that a model writes itself, for measurements that need text like the one it serves and no file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npufleet_pod.models.decoder import Decoder


def sample_windows(decoder: Decoder, windows: int, window_tokens: int, seed: int = 0) -> list[list[int]]:
    """`windows` pieces of `window_tokens` tokens, each drawn by the model's own probabilities behind a first token drawn evenly.

    The same on every rank, and for the same seed. Ends of sequence are tokens like others.
    """
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(decoder.config.vocab_size, (windows, 1), generator=random)
    caches = [_Growing(decoder.config.layers) for _ in range(windows)]
    lengths = [1] * windows
    with torch.inference_mode():
        for position in range(window_tokens - 1):
            positions = torch.full((windows,), position)
            newest = tokens[:, -1].to(decoder.device)
            # Where the rotation depends on the length, a window is computed as a whole later.
            turned_by = torch.full((windows,), window_tokens)
            hidden = decoder.forward(newest, positions.to(decoder.device), lengths, caches, turned_by.to(decoder.device))
            probabilities = torch.softmax(decoder.logits(hidden).cpu(), dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=random)), dim=1)
    drawn: list[list[int]] = tokens.tolist()
    return drawn


class _Growing:
    """Keys and values of one sequence, joined anew at every token. A `SequenceCache`."""

    def __init__(self, layers: int) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new: Sequence[Tensor] = (keys.transpose(0, 1), values.transpose(0, 1))
        old = self._layers[layer]
        grown = new if old is None else [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
        self._layers[layer] = (grown[0], grown[1])
        return grown[0], grown[1]
