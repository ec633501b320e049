"""Runs the steps that the scheduler decides: builds the batch on one thread, computes it and chooses tokens on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npufleet_pod.engine.changes import Added, Change
from npufleet_pod.engine.device import Device, Event
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.memory.kv_cache import Place, ZeroCopyKVCache
from npufleet_pod.engine.memory.layout import Transfer
from npufleet_pod.engine.request import SampledToken
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.engine.step import FUTURE_TOKEN, Step
from npufleet_pod.engine.step_cache import StepCache
from npufleet_pod.errors import TransferError
from npufleet_pod.models.decoder import Decoder
from npufleet_pod.models.fusion_plan import FusionPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, ready to compute."""

    changes: Sequence[Change]
    transfers: Sequence[Transfer]
    counts: Mapping[str, int]
    starts: Mapping[str, int]
    samples: Sequence[tuple[str, int]]
    """Requests that get a token, each with the row of its last one."""
    awaited: Sequence[tuple[str, int]]
    """Requests whose input an earlier step chooses, each with its row."""
    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor | None
    """Length of sequence that each token is rotated by, where the model's rotation depends on it."""
    cache: StepCache
    plan: FusionPlan
    ready: Event


class ModelRunner:
    """Holds the KV cache and what sampling remembers. `prepare` may run on another thread than the rest."""

    def __init__(self, decoder: Decoder, cache: ZeroCopyKVCache, device: Device, fusion: DynamicFusionManager) -> None:
        self._decoder = decoder
        self._fusion = fusion
        self._cache = cache
        self._device = device
        self._sampler = Sampler(decoder.config.vocab_size)
        self._newest: dict[str, int] = {}
        """The last token chosen for each request."""
        self._prompt_lengths: dict[str, int] = {}
        """Of the requests that steps hold, where the rotation depends on it; known to `prepare` only."""

    def prepare(self, step: Step, changes: Sequence[Change]) -> Batch:
        """Build the batch of `step`."""
        counts, plan = self._in_order(step)
        token_ids = np.fromiter((token for name in counts for token in step.inputs[name]), dtype=np.int64)
        ranges = [np.arange(step.starts[name], step.starts[name] + count) for name, count in counts.items()]
        last_rows = dict(zip(counts, (np.cumsum(list(counts.values())) - 1).tolist(), strict=True)) if counts else {}
        awaited_rows = set(np.flatnonzero(token_ids == FUTURE_TOKEN).tolist())
        slots = [self._cache.slots(step.tables[name], step.starts[name], count) for name, count in counts.items()]
        with self._device.copies():
            return Batch(
                changes=changes,
                transfers=step.transfers,
                counts=counts,
                starts=step.starts,
                samples=[(name, row) for name, row in last_rows.items() if name in step.samples],
                # Only a request's newest token can be one that is not known yet.
                awaited=[(name, row) for name, row in last_rows.items() if row in awaited_rows],
                token_ids=self._device.to_device(torch.from_numpy(token_ids)),
                positions=self._device.to_device(torch.from_numpy(np.concatenate(ranges) if ranges else np.zeros(0, np.int64))),
                rope_lengths=self._rope_lengths(step, changes, counts),
                cache=StepCache(
                    self._cache,
                    [self._place(step, name) for name in counts],
                    self._device.to_device(torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64)),
                ),
                plan=plan,
                ready=self._device.record(),
            )

    def compute(self, batch: Batch) -> dict[str, SampledToken]:
        """The new token of each request that gets one. Batches are computed in the order in which their steps were decided."""
        with torch.inference_mode():
            self._transfer(batch.transfers)
            for change in batch.changes:
                self._apply(change)
            if not batch.counts:
                return {}
            batch.ready.wait()
            for name, row in batch.awaited:
                # A request without a token failed in an earlier step: what is computed of it goes nowhere.
                batch.token_ids[row] = self._newest.get(name, 0)
            lengths = list(batch.counts.values())
            hidden = self._decoder.forward(batch.token_ids, batch.positions, lengths, batch.cache, batch.rope_lengths, batch.plan)
            end = 0
            for name, count in batch.counts.items():
                end += count
                self._sampler.observe_prompt(name, batch.starts[name], hidden[end - count : end], self._decoder.logits)
            if not batch.samples:
                return {}
            rows = [row for _, row in batch.samples]
            sampled = self._sampler.sample([name for name, _ in batch.samples], self._decoder.logits(hidden[rows]))
        self._newest.update((name, token.token_id) for name, token in sampled.items())
        return sampled

    def remove(self, request_id: str) -> None:
        """Forget a request that no later step holds; an unknown one is no error."""
        self._sampler.remove(request_id)
        self._newest.pop(request_id, None)

    def _in_order(self, step: Step) -> tuple[dict[str, int], FusionPlan]:
        """The step's tokens by request, in the order in which they are computed."""
        names = list(step.tokens)
        places, plan = self._fusion.order(list(step.tokens.values()), [step.starts[name] + step.tokens[name] for name in names])
        return {names[place]: step.tokens[names[place]] for place in places}, plan

    def _place(self, step: Step, name: str) -> Place:
        place = self._cache.place(step.tables[name], step.starts[name] + step.tokens[name])
        return place if isinstance(place, slice) else self._device.to_device(place)

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        try:
            self._cache.execute(transfers)
        except Exception as error:
            raise TransferError(f"KV could not be moved: {error}") from error

    def _rope_lengths(self, step: Step, changes: Sequence[Change], counts: Mapping[str, int]) -> Tensor | None:
        """(T,) int64: a prompt is rotated by its whole length however it is cut into steps, an answer's token by the length up to it."""
        if not self._decoder.config.rope_depends_on_length:
            return None
        for change in changes:
            if isinstance(change, Added):
                self._prompt_lengths[change.request.request_id] = len(change.request.prompt_token_ids)
            else:
                self._prompt_lengths.pop(change, None)
        lengths = [
            np.maximum(np.arange(step.starts[name], step.starts[name] + count) + 1, self._prompt_lengths[name])
            for name, count in counts.items()
        ]
        return self._device.to_device(torch.from_numpy(np.concatenate(lengths) if lengths else np.zeros(0, np.int64)))

    def _apply(self, change: Change) -> None:
        if isinstance(change, str):
            self.remove(change)
        else:
            self._sampler.add(change.request, change.seed, self._decoder.config.eos_token_ids)
