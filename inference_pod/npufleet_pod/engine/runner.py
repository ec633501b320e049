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
from npufleet_pod.engine.fusion import DynamicFusionManager
from npufleet_pod.engine.rank import PreparedStep, Rank
from npufleet_pod.engine.request import SampledToken
from npufleet_pod.engine.sampling import Sampler
from npufleet_pod.engine.step import FUTURE_TOKEN, Step
from npufleet_pod.engine.step_input import StepInput
from npufleet_pod.models.fusion_plan import FusionPlan


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
    step: StepInput
    prepared: PreparedStep


class ModelRunner:
    """Holds what sampling remembers. `prepare` may run on another thread than the rest."""

    def __init__(self, rank: Rank, fusion: DynamicFusionManager, peers: Peers | None = None) -> None:
        self._rank = rank
        self._fusion = fusion
        self._peers = peers or NoPeers()
        self._sampler = Sampler(rank.decoder.config.vocab_size)
        self._newest: dict[str, int] = {}
        """The last token chosen for each request."""
        self._prompt_lengths: dict[str, int] = {}
        """Of the requests that steps hold, where the rotation depends on it; known to `prepare` only."""
        self._number = 0

    def prepare(self, step: Step, changes: Sequence[Change]) -> Batch:
        """Build the batch of `step`."""
        self._number += 1
        self._note_prompts(changes)
        counts, plan = self._in_order(step)
        token_ids = np.fromiter((token for name in counts for token in step.inputs[name]), dtype=np.int64)
        last_rows = dict(zip(counts, (np.cumsum(list(counts.values())) - 1).tolist(), strict=True)) if counts else {}
        awaited_rows = set(np.flatnonzero(token_ids == FUTURE_TOKEN).tolist())
        samples = [(name, row) for name, row in last_rows.items() if name in step.samples]
        pages = [step.tables[name].pages for name in counts]
        given = StepInput(
            transfers=step.transfers,
            token_ids=token_ids,
            counts=tuple(counts.values()),
            starts=tuple(step.starts[name] for name in counts),
            prompt_lengths=tuple(self._prompt_lengths[name] for name in counts) if self._length_matters else None,
            pages=np.array([page for table in pages for page in table], dtype=np.int32),
            page_counts=tuple(len(table) for table in pages),
            sample_rows=tuple(row for _, row in samples),
            plan=plan,
        )
        if given.counts or given.transfers:
            self._peers.prepare(self._number, given)
        return Batch(
            number=self._number,
            changes=changes,
            counts=counts,
            starts=step.starts,
            samples=samples,
            # Only a request's newest token can be one that is not known yet.
            awaited=[(name, row) for name, row in last_rows.items() if row in awaited_rows],
            step=given,
            prepared=self._rank.prepare(given),
        )

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
            sampled = self._sampler.sample([name for name, _ in batch.samples], logits)
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

    def _score(self, batch: Batch, known: Sequence[tuple[int, int]]) -> Tensor | None:
        """Logits of the rows that are sampled, None if there are none; prompts that asked for it are scored on the way."""
        decoder = self._rank.decoder
        hidden = self._rank.forward(batch.prepared, known)
        logits = decoder.logits(hidden[list(batch.step.sample_rows)]) if batch.samples else None
        start = 0
        for name, count in batch.counts.items():
            self._sampler.observe_prompt(name, batch.starts[name], count, partial(self._score_rows, hidden, start))
            self._sampler.observe_hidden(name, batch.starts[name], hidden[start : start + count])
            start += count
        return logits

    def _score_rows(self, hidden: Tensor, start: int, first: int, last: int) -> Tensor:
        """Logits of a sequence's new tokens [first, last), whose rows in the newest step's hidden states begin at `start`."""
        self._peers.score(start + first, start + last)
        return self._rank.decoder.logits(hidden[start + first : start + last])

    @property
    def _length_matters(self) -> bool:
        return self._rank.decoder.config.rope_depends_on_length

    def _note_prompts(self, changes: Sequence[Change]) -> None:
        if not self._length_matters:
            return
        for change in changes:
            if isinstance(change, Added):
                self._prompt_lengths[change.request.request_id] = len(change.request.prompt_token_ids)
            else:
                self._prompt_lengths.pop(change, None)

    def _apply(self, change: Change) -> None:
        if isinstance(change, str):
            self.remove(change)
        else:
            self._sampler.add(change.request, change.seed, self._rank.decoder.config.eos_token_ids)
