"""What each rank of a model does in a step, the only one of an unsharded model included: move KV, compute, score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npufleet_pod.engine.device import Device, Event
from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.kv_cache import Place, ZeroCopyKVCache
from npufleet_pod.engine.memory.kv_parts import PageOrder
from npufleet_pod.engine.memory.layout import Transfer
from npufleet_pod.engine.step_cache import PagedStepCache, StepCache
from npufleet_pod.engine.step_input import StepInput
from npufleet_pod.errors import TransferError
from npufleet_pod.models.decoder import Decoder
from npufleet_pod.models.fusion_plan import FusionPlan


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step's input on the device."""

    counts: tuple[int, ...]
    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor | None
    """Length of sequence that each token is rotated by, where the model's rotation depends on it."""
    cache: StepCache | PagedStepCache
    plan: FusionPlan
    ready: Event


class Rank:
    """Holds a model's weights and KV, or a rank's part of them. `prepare` may run on another thread than the rest."""

    def __init__(self, decoder: Decoder, cache: ZeroCopyKVCache, device: Device) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = device

    def prepare(self, step: StepInput) -> PreparedStep:
        """Put a step's input on the device."""
        tables = self._tables(step)
        news = list(zip(tables, step.starts, step.counts, strict=True))
        positions = _join([np.arange(start, start + count) for _, start, count in news])
        slots = [self.cache.slots(table, start, count) for table, start, count in news]
        rope_lengths = None
        if step.prompt_lengths is not None:
            # A prompt is rotated by its whole length however it is cut into steps, an answer's token by the length up to it.
            rope_lengths = np.maximum(positions + 1, np.repeat(np.array(step.prompt_lengths, dtype=np.int64), step.counts))
        with self.device.copies():
            return PreparedStep(
                counts=step.counts,
                token_ids=self.device.to_device(torch.from_numpy(step.token_ids)),
                positions=self.device.to_device(torch.from_numpy(positions)),
                rope_lengths=None if rope_lengths is None else self.device.to_device(torch.from_numpy(rope_lengths)),
                cache=self._step_cache(news, self.device.to_device(torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64))),
                plan=step.plan,
                ready=self.device.record(),
            )

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        """Move KV between memories. Raises TransferError."""
        try:
            self.cache.execute(transfers)
        except Exception as error:
            raise TransferError(f"KV could not be moved: {error}") from error

    def forward(self, step: PreparedStep, known: Sequence[tuple[int, int]]) -> Tensor:
        """Hidden states (T, hidden). known: rows whose token was not known when the step was prepared, each with its token."""
        step.ready.wait()
        for row, token in known:
            step.token_ids[row] = token
        return self.decoder.forward(step.token_ids, step.positions, list(step.counts), step.cache, step.rope_lengths, step.plan)

    def _tables(self, step: StepInput) -> list[HierarchicalBlockTable]:
        tables, start, pages = [], 0, step.pages.tolist()
        for count in step.page_counts:
            table = HierarchicalBlockTable(self.cache.layout)
            table.pages = pages[start : start + count]
            tables.append(table)
            start += count
        return tables

    def _step_cache(self, news: Sequence[tuple[HierarchicalBlockTable, int, int]], slots: Tensor) -> StepCache | PagedStepCache:
        """news: each sequence's table, the number of its first new token, and how many are new."""
        lengths = [start + count for _, start, count in news]
        if self.cache.order is PageOrder.PAGE_MAJOR:
            table = self.device.to_device(self.cache.block_tables([table for table, _, _ in news]))
            return PagedStepCache(self.cache, table, lengths, slots)
        return StepCache(self.cache, [self._place(table, length) for (table, _, _), length in zip(news, lengths, strict=True)], slots)

    def _place(self, table: HierarchicalBlockTable, length: int) -> Place:
        place = self.cache.place(table, length)
        return place if isinstance(place, slice) else self.device.to_device(place)


def _join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
