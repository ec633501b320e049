"""Changes single logits of a batch: biases, penalties, tokens that may not come yet. Costs follow the tokens named, not the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from npufleet_pod.engine.request import SamplingParams

MIN_CAPACITY = 32
LOWEST_ALLOWED = -1e30
"""Below any score of a model; still finite, and above what stands for no number, when divided by the lowest temperature."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Strengths as OpenAI (frequency, presence) and vLLM (repetition) define them."""

    frequency: float
    presence: float
    repetition: float


class SeenTokens:
    """The distinct tokens of one sequence, each with how often it was generated. Prompt tokens count as seen, zero times generated."""

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        prompt = np.fromiter(dict.fromkeys(prompt_token_ids), dtype=np.int64)
        capacity = max(MIN_CAPACITY, 2 * len(prompt))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(prompt)] = prompt
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        """(n,) distinct token ids."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """(n,) times that each was generated."""
        return self._counts[: len(self._slots)]

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
        self._counts[slot] += 1


class BadWords:
    """Sequences of tokens that may not be generated, as one answer goes on."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """words: token ids, at least one each."""
        self._words = words
        self._kept = max(map(len, words), default=1) - 1
        self._last: tuple[int, ...] = ()

    def add(self, token_id: int) -> None:
        """Note a generated token."""
        self._last = (*self._last, token_id)[-self._kept :] if self._kept else ()

    def endings(self) -> NDArray[np.int64]:
        """(n,) tokens that would complete one of the sequences now."""
        ends = {word[-1] for word in self._words if len(word) == 1 or self._last[-(len(word) - 1) :] == word[:-1]}
        return np.array(sorted(ends), dtype=np.int64)


def penalties_of(params: SamplingParams) -> Penalties | None:
    """The penalties of a request; None if they change nothing."""
    penalties = Penalties(params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    return None if penalties == Penalties(0.0, 0.0, 1.0) else penalties


def add_biases(logits: Tensor, biases: Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]]) -> None:
    """Add to `logits` (N, vocabulary), in place. biases: row to (distinct token ids, values)."""
    if not biases:
        return
    rows, ids = _places(logits, {row: ids for row, (ids, _) in biases.items()})
    logits[rows, ids] += torch.from_numpy(np.concatenate([values for _, values in biases.values()])).to(logits.device)


def penalise(logits: Tensor, seen: Mapping[int, tuple[Penalties, SeenTokens]]) -> None:
    """Penalise tokens in `logits` (N, vocabulary), in place, in vLLM's order: repetition, frequency, presence.

    A repetition penalty r makes a positive logit of any seen token logit / r, a negative one logit × r. The others subtract
    frequency × count + presence for each generated token (OpenAI, "Frequency and presence penalties").
    """
    if not seen:
        return
    lengths = [len(tokens.ids) for _, tokens in seen.values()]
    rows, ids = _places(logits, {row: tokens.ids for row, (_, tokens) in seen.items()})
    counts = torch.from_numpy(np.concatenate([tokens.counts for _, tokens in seen.values()])).to(logits.device)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths)).to(logits.device)

    penalties = [one for one, _ in seen.values()]
    repetition = spread([one.repetition for one in penalties])
    scores = logits[rows, ids]
    scores = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores -= spread([one.frequency for one in penalties]) * counts
    scores -= spread([one.presence for one in penalties]) * (counts > 0)
    logits[rows, ids] = scores


def forbid(logits: Tensor, token_ids: Mapping[int, NDArray[np.int64]]) -> None:
    """Make tokens impossible in `logits` (N, vocabulary), in place. token_ids: row to token ids."""
    if token_ids:
        logits[_places(logits, token_ids)] = float("-inf")


def allow_only(logits: Tensor, allowed: Mapping[int, NDArray[np.bool_]]) -> None:
    """Make all other tokens impossible in `logits` (N, vocabulary), in place. allowed: row to (vocabulary,) which tokens may come.

    A token that is allowed stays possible even where the model or another edit made it impossible.
    """
    if not allowed:
        return
    rows = torch.tensor(list(allowed), device=logits.device)
    masks = torch.from_numpy(np.stack(list(allowed.values()))).to(logits.device)
    logits[rows] = torch.where(masks, logits[rows].clamp(min=LOWEST_ALLOWED), -torch.inf)


def _places(logits: Tensor, token_ids: Mapping[int, NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Row and column of every token named."""
    rows = np.repeat(np.fromiter(token_ids, dtype=np.int64), [len(ids) for ids in token_ids.values()])
    columns = np.concatenate(list(token_ids.values()))
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
