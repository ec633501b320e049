"""Greedy tokens straight from a decoder, without scheduler, server or paged memory between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.models.decoder import Decoder, load_decoder

CPU = torch.device("cpu")


class ListCache:
    """Keys and values of one sequence, joined anew at every step."""

    def __init__(self, config: DecoderConfig) -> None:
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.layers

    @property
    def length(self) -> int:
        """Tokens stored."""
        first = self._layers[0]
        return 0 if first is None else first[0].shape[1]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `SequenceCache`."""
        new = (keys.transpose(0, 1), values.transpose(0, 1))
        old = self._layers[layer]
        joined = new if old is None else (torch.cat((old[0], new[0]), dim=1), torch.cat((old[1], new[1]), dim=1))
        self._layers[layer] = joined
        return joined


def load_tiny_decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder in `folder`, on the CPU."""
    with open_checkpoint(folder, dtype, CPU) as checkpoint:
        return load_decoder(load_config(folder), checkpoint, select_kernels("cpu"))


def decoder_logits(decoder: Decoder, prompt: Sequence[int]) -> Tensor:
    """Scores after each token of a prompt, (len(prompt), vocabulary)."""
    ids, lengths = torch.tensor(list(prompt)), torch.full((len(prompt),), len(prompt))
    with torch.inference_mode():
        hidden = decoder.forward(ids, torch.arange(len(prompt)), [len(prompt)], [ListCache(decoder.config)], lengths)
        return decoder.logits(hidden)


def decoder_greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int, chunk: int | None = None) -> list[list[int]]:
    """The next `count` tokens of each prompt, all in one batch; prompts are computed `chunk` tokens at a time, or at once."""
    caches = [ListCache(decoder.config) for _ in prompts]
    tokens = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        while running := [i for i, prompt in enumerate(prompts) if len(tokens[i]) - len(prompt) < count]:
            new = [tokens[i][caches[i].length :][: chunk or len(tokens[i])] for i in running]
            lengths = [len(part) for part in new]
            positions = [range(caches[i].length, caches[i].length + length) for i, length in zip(running, lengths, strict=True)]
            turned_by = [max(len(prompts[i]), at + 1) for i, part in zip(running, positions, strict=True) for at in part]
            hidden = decoder.forward(
                torch.tensor([token for part in new for token in part]),
                torch.tensor([at for part in positions for at in part]),
                lengths,
                [caches[i] for i in running],
                torch.tensor(turned_by),
            )
            best = decoder.logits(hidden[torch.tensor(lengths).cumsum(0) - 1]).argmax(-1).tolist()
            for i, token in zip(running, best, strict=True):
                if caches[i].length == len(tokens[i]):
                    tokens[i].append(token)
    return [one[len(prompt) :] for one, prompt in zip(tokens, prompts, strict=True)]
