"""Runs the steps that the scheduler decides: builds the batch on one thread, computes it and chooses tokens on another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from npufleet_pod.engine.changes import Added, Change
<<<<<<< HEAD
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
=======
from npufleet_pod.engine.rank import PreparedStep, Rank
from npufleet_pod.engine.request import SampledToken
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.engine.step import FUTURE_TOKEN, Step
from npufleet_pod.engine.step_input import StepInput


class Peers(Protocol):
    """The other ranks of the model, which do what this one does, in the same order."""

    def prepare(self, number: int, step: StepInput) -> None:
        """Give them a step. Numbers grow; a step that is never computed is forgotten with the next that is."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is done inside is done by all: whatever goes wrong there ends all of them, and is raised as a RankError that says where."""
        ...

    def compute(self, number: int, known: Sequence[tuple[int, int]]) -> None:
        """Let them compute a step and score its samples; known: see `Rank.forward`."""
        ...

    def wait_done(self) -> None:
        """Wait until they have computed the newest step, where it has no tokens: one with tokens ends together everywhere."""
        ...

    def score(self, first: int, last: int) -> None:
        """Let them score rows [first, last) of the step that they computed last."""
        ...


class NoPeers:
    """An unsharded model's."""

    def prepare(self, number: int, step: StepInput) -> None:
        """Nobody to tell."""

    def together(self) -> AbstractContextManager[None]:
        """Nobody to end."""
        return nullcontext()

    def compute(self, number: int, known: Sequence[tuple[int, int]]) -> None:
        """Nobody to tell."""

    def wait_done(self) -> None:
        """Nobody to wait for."""

    def score(self, first: int, last: int) -> None:
        """Nobody to tell."""
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, ready to compute."""

    number: int
    changes: Sequence[Change]
    counts: Mapping[str, int]
    starts: Mapping[str, int]
    samples: Sequence[tuple[str, int]]
    """Requests that get a token, each with the row of its last one."""
    awaited: Sequence[tuple[str, int]]
    """Requests whose input an earlier step chooses, each with its row."""
<<<<<<< HEAD
    token_ids: Tensor
    positions: Tensor
    rope_lengths: Tensor | None
    """Length of sequence that each token is rotated by, where the model's rotation depends on it."""
    cache: StepCache
    plan: FusionPlan
    ready: Event
=======
    step: StepInput
    prepared: PreparedStep
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)


class ModelRunner:
    """Holds what sampling remembers. `prepare` may run on another thread than the rest."""

<<<<<<< HEAD
    def __init__(self, decoder: Decoder, cache: ZeroCopyKVCache, device: Device, fusion: DynamicFusionManager) -> None:
        self._decoder = decoder
        self._fusion = fusion
        self._cache = cache
        self._device = device
        self._sampler = Sampler(decoder.config.vocab_size)
=======
    def __init__(self, rank: Rank, peers: Peers | None = None) -> None:
        self._rank = rank
        self._peers = peers or NoPeers()
        self._sampler = Sampler(rank.decoder.config.vocab_size)
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)
        self._newest: dict[str, int] = {}
        """The last token chosen for each request."""
        self._prompt_lengths: dict[str, int] = {}
        """Of the requests that steps hold, where the rotation depends on it; known to `prepare` only."""
        self._number = 0

    def prepare(self, step: Step, changes: Sequence[Change]) -> Batch:
        """Build the batch of `step`."""
<<<<<<< HEAD
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
=======
        self._number += 1
        self._note_prompts(changes)
        token_ids = np.fromiter((token for inputs in step.inputs.values() for token in inputs), dtype=np.int64)
        last_rows = dict(zip(step.tokens, (np.cumsum(list(step.tokens.values())) - 1).tolist(), strict=True)) if step.tokens else {}
        awaited_rows = set(np.flatnonzero(token_ids == FUTURE_TOKEN).tolist())
        samples = [(name, row) for name, row in last_rows.items() if name in step.samples]
        pages = [step.tables[name].pages for name in step.tokens]
        given = StepInput(
            transfers=step.transfers,
            token_ids=token_ids,
            counts=tuple(step.tokens.values()),
            starts=tuple(step.starts[name] for name in step.tokens),
            prompt_lengths=tuple(self._prompt_lengths[name] for name in step.tokens) if self._length_matters else None,
            pages=np.array([page for table in pages for page in table], dtype=np.int32),
            page_counts=tuple(len(table) for table in pages),
            sample_rows=tuple(row for _, row in samples),
        )
        if given.counts or given.transfers:
            self._peers.prepare(self._number, given)
        return Batch(
            number=self._number,
            changes=changes,
            counts=step.tokens,
            starts=step.starts,
            samples=samples,
            # Only a request's newest token can be one that is not known yet.
            awaited=[(name, row) for name, row in last_rows.items() if row in awaited_rows],
            step=given,
            prepared=self._rank.prepare(given),
        )
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)

    def compute(self, batch: Batch) -> dict[str, SampledToken]:
        """The new token of each request that gets one. Batches are computed in the order in which their steps were decided."""
        for change in batch.changes:
            self._apply(change)
        if not batch.counts and not batch.step.transfers:
            return {}
        # A request without a token failed in an earlier step: what is computed of it goes nowhere.
        known = [(row, self._newest.get(name, 0)) for name, row in batch.awaited]
        with torch.inference_mode():
            with self._peers.together():
                self._peers.compute(batch.number, known)
                self._rank.transfer(batch.step.transfers)
                logits = None
                if batch.counts:
                    logits = self._score(batch, known)
                else:
                    self._peers.wait_done()
            if logits is None:
                return {}
<<<<<<< HEAD
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
=======
            sampled = self._sampler.sample([name for name, _ in batch.samples], logits)
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)
        self._newest.update((name, token.token_id) for name, token in sampled.items())
        return sampled

    def remove(self, request_id: str) -> None:
        """Forget a request that no later step holds; an unknown one is no error."""
        self._sampler.remove(request_id)
        self._newest.pop(request_id, None)

<<<<<<< HEAD
    def _in_order(self, step: Step) -> tuple[dict[str, int], FusionPlan]:
        """The step's tokens by request, in the order in which they are computed."""
        names = list(step.tokens)
        places, plan = self._fusion.order(list(step.tokens.values()), [step.starts[name] + step.tokens[name] for name in names])
        return {names[place]: step.tokens[names[place]] for place in places}, plan

    def _place(self, step: Step, name: str) -> Place:
        place = self._cache.place(step.tables[name], step.starts[name] + step.tokens[name])
        return place if isinstance(place, slice) else self._device.to_device(place)
=======
    def _score(self, batch: Batch, known: Sequence[tuple[int, int]]) -> Tensor | None:
        """Logits of the rows that are sampled, None if there are none; prompts that asked for it are scored on the way."""
        decoder = self._rank.decoder
        hidden = self._rank.forward(batch.prepared, known)
        logits = decoder.logits(hidden[list(batch.step.sample_rows)]) if batch.samples else None
        start = 0
        for name, count in batch.counts.items():
            self._sampler.observe_prompt(name, batch.starts[name], count, partial(self._score_rows, hidden, start))
            start += count
        return logits
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)

    def _score_rows(self, hidden: Tensor, start: int, first: int, last: int) -> Tensor:
        """Logits of a sequence's new tokens [first, last), whose rows in the newest step's hidden states begin at `start`."""
        self._peers.score(start + first, start + last)
        return self._rank.decoder.logits(hidden[start + first : start + last])

<<<<<<< HEAD
    def _rope_lengths(self, step: Step, changes: Sequence[Change], counts: Mapping[str, int]) -> Tensor | None:
        """(T,) int64: a prompt is rotated by its whole length however it is cut into steps, an answer's token by the length up to it."""
        if not self._decoder.config.rope_depends_on_length:
            return None
=======
    @property
    def _length_matters(self) -> bool:
        return self._rank.decoder.config.rope_depends_on_length

    def _note_prompts(self, changes: Sequence[Change]) -> None:
        if not self._length_matters:
            return
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)
        for change in changes:
            if isinstance(change, Added):
                self._prompt_lengths[change.request.request_id] = len(change.request.prompt_token_ids)
            else:
                self._prompt_lengths.pop(change, None)
<<<<<<< HEAD
        lengths = [
            np.maximum(np.arange(step.starts[name], step.starts[name] + count) + 1, self._prompt_lengths[name])
            for name, count in counts.items()
        ]
        return self._device.to_device(torch.from_numpy(np.concatenate(lengths) if lengths else np.zeros(0, np.int64)))
=======
>>>>>>> fe2f3c9 (Serve a model on several ranks: a process each, one message per step, exchange through Gloo or HCCL, and an end that names whoever failed)

    def _apply(self, change: Change) -> None:
        if isinstance(change, str):
            self.remove(change)
        else:
            self._sampler.add(change.request, change.seed, self._rank.decoder.config.eos_token_ids)
