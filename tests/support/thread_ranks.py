"""Tensor-parallel ranks as threads of the test's process: what each computes is what it would compute in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import load_config
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.sharding import shard

Result = TypeVar("Result")
CPU = torch.device("cpu")
STEP_SECONDS = 60


class _Shared:
    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=STEP_SECONDS)
        self.tensors: list[Tensor | None] = [None] * ranks


class ThreadCollective:
    """A `models.collective.Collective` between threads; sums are taken in the order of the ranks."""

    def __init__(self, shared: _Shared, rank: int, size: int) -> None:
        self._shared = shared
        self._rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collective."""
        assert tensor.is_contiguous()
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        """See Collective."""
        assert tensor.is_contiguous()
        assert tensor.shape[1] == sizes[self._rank]
        parts = self._exchange(tensor)
        assert [part.shape[1] for part in parts] == list(sizes)
        return torch.cat(parts, dim=1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._shared.tensors[self._rank] = tensor
        self._shared.barrier.wait()
        parts = [part.clone() for part in self._shared.tensors if part is not None]
        self._shared.barrier.wait()
        return parts


def on_ranks(folder: Path, ranks: int, compute: Callable[[Decoder], Result]) -> list[Result]:
    """Load `ranks` parts of the model in `folder`, run `compute` with each on a thread of its own, and return what each gave."""
    shared, config = _Shared(ranks), load_config(folder)

    def run(rank: int) -> Result:
        with open_checkpoint(folder, torch.float32, CPU) as checkpoint:
            decoder = load_decoder(
                config,
                checkpoint,
                select_kernels("cpu"),
                part=shard(config, rank, ranks),
                ranks=ThreadCollective(shared, rank, ranks),
            )
        try:
            return compute(decoder)
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
