"""Draws one token per row of a batch of logits. A row's token depends on that row alone, never on the rest of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from npufleet_pod.engine.request import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature leave float32's range; the likeliest token is taken."""
CANDIDATES = 256
"""How many of the likeliest tokens are looked at before a whole row is sorted: a nucleus rarely has more."""
ROWS = 4
"""Rows whose probabilities are held at a time: few, so that they stay in the CPU's cache."""

ROUNDING = 1e-6
"""Sums of float32 probabilities are no more exact: a nucleus that reaches top_p but for rounding has reached it."""

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniforms(seeds: Sequence[int], draws: Sequence[int]) -> Tensor:
    """Number `draws[i]` of the stream of `seeds[i]`: (N,) float64 in [0, 1).

    A pure function, so that a draw does not depend on the batch, and is the same when a step is computed again. SplitMix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014); the seed is mixed first, so that neighbouring seeds do
    not share a stream.
    """
    start = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
    state = start + (np.array(draws, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    return torch.from_numpy((_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Token ids, (N,) int64. logits: (N, vocabulary) float32; numbers: (N,) float64 in [0, 1), one per row.

    The order is vLLM's: temperature, then min_p, top_k, and top_p on what is left; equally likely tokens count by id. Rows without one
    finite logit get some token of the vocabulary.
    """
    greedy = [row for row, one in enumerate(params) if one.greedy or one.temperature < MIN_TEMPERATURE]
    if len(greedy) == len(params):
        return _likeliest(logits)
    chosen = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        chosen[rows] = _likeliest(logits[rows])
    taken = set(greedy)
    wide = [row for row, one in enumerate(params) if row not in taken and one.top_k == 0 and one.top_p >= 1]
    narrow = [row for row, one in enumerate(params) if row not in taken and (one.top_k > 0 or one.top_p < 1)]
    for kind, pick in ((wide, _pick_by_id), (narrow, _pick_by_rank)):
        for start in range(0, len(kind), ROWS):
            part = kind[start : start + ROWS]
            rows = torch.tensor(part, device=logits.device)
            here = [params[row] for row in part]
            chosen[rows] = pick(_scaled(logits[rows], here), here, numbers[part])
    return chosen


def _likeliest(logits: Tensor) -> Tensor:
    """Index of the greatest number in each row: (N,) int64. argmax takes a NaN for the greatest of all."""
    values, ids = logits.max(-1)
    broken = values.isnan()
    if bool(broken.any()):
        ids[broken] = torch.nan_to_num(logits[broken], nan=torch.finfo(torch.float32).min, posinf=torch.inf, neginf=-torch.inf).argmax(-1)
    return ids


def _scaled(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """logits / temperature, finite: NaN is below every number, and what was forbidden is below NaN."""
    low = torch.finfo(torch.float32).min
    temperatures = torch.tensor([one.temperature for one in params], dtype=torch.float32, device=logits.device)
    return torch.nan_to_num_(logits.to(torch.float32) / temperatures[:, None], nan=low / 2, neginf=low)


def _pick_by_id(scaled: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Where only min_p may leave tokens out, nothing has to be sorted."""
    probabilities = scaled.softmax(-1)
    if any(one.min_p > 0 for one in params):
        floors = _column([one.min_p for one in params], probabilities) * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(probabilities >= floors, probabilities, 0.0)
    cumulative = probabilities.cumsum(-1, dtype=_sum_dtype(scaled))
    return _invert(cumulative, cumulative[:, -1:], numbers)


def _pick_by_rank(scaled: Tensor, params: Sequence[SamplingParams], numbers: Tensor) -> Tensor:
    """Rank tokens and draw among the first of them. Rows whose limit may lie beyond the candidates are tried with more."""
    vocabulary = scaled.shape[-1]
    chosen = torch.empty(len(params), dtype=torch.int64, device=scaled.device)
    probabilities = scaled.softmax(-1)
    pending = torch.arange(len(params), device=scaled.device)
    for count in (min(CANDIDATES, vocabulary), vocabulary):
        here = [params[row] for row in pending.tolist()]
        values, ids = _ranked(scaled[pending], count)
        ranked = probabilities[pending[:, None], ids]
        cumulative = ranked.cumsum(-1, dtype=_sum_dtype(scaled))
        kept, settled = _kept(ranked, cumulative, values, here, vocabulary)
        rank = _invert(cumulative, cumulative.gather(-1, kept[:, None] - 1), numbers[pending.cpu()])
        chosen[pending[settled]] = ids.gather(-1, rank[:, None])[:, 0][settled]
        pending = pending[~settled]
        if pending.numel() == 0:
            break
    return chosen


def _ranked(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest values of each row, descending, equal ones by id; and their ids."""
    if count == scaled.shape[-1]:
        return _sorted(scaled)
    values, ids = scaled.topk(count, dim=-1)
    if bool((values[:, 1:] == values[:, :-1]).any()):
        ids = ids.sort(dim=-1).values
        values, order = scaled.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    return values, ids


def _sorted(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Whole rows, descending, equal values by id; and the ids."""
    if scaled.device.type != "cpu":
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
        return values, ids
    # NumPy sorts integers by SIMD, some ten times faster than torch sorts floats with their places: the value's bits, in an order
    # that falls with the value, above the id. Adding 0 makes the two zeros one.
    bits = (scaled + 0.0).view(torch.int32)
    falling = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys = (falling << 32) | torch.arange(scaled.shape[-1])
    keys.numpy().sort(axis=-1)
    ids = keys & 0xFFFFFFFF
    return scaled.gather(-1, ids), ids


def _kept(ranked: Tensor, cumulative: Tensor, values: Tensor, params: Sequence[SamplingParams], vocabulary: int) -> tuple[Tensor, Tensor]:
    """How many of the first candidates the parameters leave, (N,) at least 1; and whether further candidates could not change it, (N,).

    ranked, cumulative, values: (N, K) probability, its running sum, and logit, by rank. min_p, top_k and top_p each keep a beginning
    of the ranking.
    """
    candidates = ranked.shape[-1]
    complete = candidates == vocabulary
    top_k = torch.tensor([min(one.top_k or vocabulary, vocabulary) for one in params], device=ranked.device)
    min_p, top_p = _column([one.min_p for one in params], ranked), _column([one.top_p for one in params], cumulative)
    passing = (ranked >= min_p * ranked[:, :1]).sum(-1)
    before_top_p = torch.minimum(passing, top_k).clamp(min=1)
    total = cumulative.gather(-1, before_top_p[:, None] - 1)
    known = (passing < candidates) | (top_k <= candidates)
    if not complete:
        # Where neither min_p nor top_k leaves anything out, no sum is needed: all tokens have 1 together.
        everything = (top_k == vocabulary) & (min_p[:, 0] == 0)
        total = torch.where(everything[:, None], torch.ones_like(total), total)
        known |= everything
    before = torch.cat([torch.zeros_like(total), cumulative[:, :-1]], dim=-1)
    nucleus = torch.where(top_p[:, 0] < 1, (before < top_p * total * (1 - ROUNDING)).sum(-1), candidates)
    kept = torch.minimum(before_top_p, nucleus).clamp(min=1)
    if complete:
        return kept, torch.ones_like(known)
    # Of several equal values at its end, topk takes any: the limit must lie before them.
    clear = values.gather(-1, kept[:, None] - 1)[:, 0] > values[:, -1]
    return kept, known & clear


def _invert(cumulative: Tensor, total: Tensor, numbers: Tensor) -> Tensor:
    """First index whose running sum is beyond number × total: (N,) int64. Rounding never carries it past the total's own index."""
    targets = numbers.to(cumulative)[:, None] * total
    index = torch.searchsorted(cumulative, targets, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, total.contiguous()))[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    """NPUs have no float64."""
    return torch.float64 if tensor.device.type == "cpu" else torch.float32


def _mix(state: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
