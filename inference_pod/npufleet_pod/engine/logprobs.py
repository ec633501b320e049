"""Log probabilities of tokens, from the logits as the model gave them. They are always finite, since JSON knows no infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npufleet_pod.engine.request import MAX_TOP_LOGPROBS, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""What stands for an impossible token, or where the model's scores are no numbers (OpenAI, API reference of logprobs)."""
PROMPT_ROWS = 64
"""Positions of a prompt whose logits are held at a time."""


def token_logprobs(logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row. logits: (N, vocabulary); token_ids: the token at each row; tops: how many of the likeliest each row wants."""
    scores = logits.to(torch.float32).log_softmax(-1)
    # The same number of alternatives whatever the others ask for, so that the order of equal ones does not depend on the batch.
    count = min(MAX_TOP_LOGPROBS, scores.shape[-1])
    own = _finite(scores.gather(-1, torch.tensor(token_ids, device=scores.device)[:, None]))[:, 0].tolist()
    if not any(tops):
        return [TokenLogprobs(token, logprob) for token, logprob in zip(token_ids, own, strict=True)]
    values, ids = torch.nan_to_num(scores, nan=-torch.inf).topk(count, dim=-1)
    best = zip(ids.tolist(), _finite(values).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(row_ids[:top], row_values[:top], strict=True)))
        for token, logprob, top, (row_ids, row_values) in zip(token_ids, own, tops, best, strict=True)
    ]


class PromptScores:
    """Collects the log probabilities of a prompt's tokens while its positions are computed, in whatever chunks and however often."""

    def __init__(self, token_ids: Sequence[int], top: int) -> None:
        self._token_ids = token_ids
        self._top = top
        self._entries: list[TokenLogprobs | None] = [None] * len(token_ids)

    @property
    def entries(self) -> tuple[TokenLogprobs | None, ...]:
        """One per token of the prompt; None for the first, which nothing predicts."""
        return tuple(self._entries)

    def observe(self, start: int, count: int, score: Callable[[int, int], Tensor]) -> None:
        """Take `count` positions from `start`; `score` makes logits of a range of them, counted from 0. Later tokens are ignored."""
        end = min(start + count, len(self._token_ids) - 1)
        for first in range(start, end, PROMPT_ROWS):
            last = min(first + PROMPT_ROWS, end)
            following = self._token_ids[first + 1 : last + 1]
            logits = score(first - start, last - start)
            self._entries[first + 1 : last + 1] = token_logprobs(logits, following, [self._top] * len(following))


def _finite(scores: Tensor) -> Tensor:
    return torch.nan_to_num(scores, nan=LOWEST_LOGPROB, posinf=0.0, neginf=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB, max=0.0)
