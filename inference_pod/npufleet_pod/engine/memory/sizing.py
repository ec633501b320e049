"""How many pages of KV a device holds, from what is measured once the weights are loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from npufleet_pod.engine.memory.errors import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class LinearBytes:
    """Memory that grows with a number of things: a constant part, and some for each."""

    constant: float
    each: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> LinearBytes:
        """The line through two measurements, (number, bytes), of which the larger number comes second.

        Neither part is below 0: memory that seems to shrink was measured beside something else, and the larger figure counts.
        """
        each = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(max(0.0, large[1] - each * large[0]), each)

    def at(self, number: int) -> int:
        """Bytes for `number` things, rounded up."""
        return ceil(self.constant + self.each * number)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What a step takes beyond weights and KV while it runs, measured on small steps.

    forward: over its tokens. attention_bytes: scratch of one sequence at the greatest lengths of the strategies, which is not linear.
    sampling: over the sequences that get a token. hidden_bytes: of one token's hidden state, all of which are held until tokens are chosen.
    beside_bytes: what libraries took without torch.
    """

    forward: LinearBytes
    attention_bytes: int
    sampling: LinearBytes
    hidden_bytes: int
    beside_bytes: int = 0

    def peak_bytes(self, tokens: int, sequences: int) -> int:
        """Of the largest step: the forward pass, or the choice of tokens after it."""
        computed, chosen = self.forward.at(tokens) + self.attention_bytes, self.sampling.at(sequences) + tokens * self.hidden_bytes
        return max(computed, chosen) + self.beside_bytes


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory that is left for KV.

    free_bytes: measured after loading and a warm-up step. peak_step_bytes: what the largest step took beyond that while it ran, measured.
    share: of the rest, what is given to KV, over 0 up to 1; the remainder is for what nobody measured. gathered_share: part of the KV that
    a step may hold a second time: one layer's, where no sequence lies in adjacent memory.
    """

    free_bytes: int
    peak_step_bytes: int
    share: float
    gathered_share: float = 0.0

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV."""
        return max(0, int((self.free_bytes - self.peak_step_bytes) * self.share / (1 + self.gathered_share)))

    def bytes_for(self, kv_bytes: int) -> int:
        """Memory that would have to be free for so much KV."""
        return ceil(kv_bytes * (1 + self.gathered_share) / self.share) + self.peak_step_bytes


def kv_page_count(budget: KVBudget, page_bytes: int, *, useful_pages: int, min_pages: int = 1) -> int:
    """Pages to allocate: what the budget holds, at most `useful_pages`, which all sequences at full length would take.

    Raises OutOfMemoryError if fewer than `min_pages` fit.
    """
    pages = min(useful_pages, budget.kv_bytes // page_bytes)
    if pages < min_pages:
        raise OutOfMemoryError(
            f"KV cache: {_mib(budget.free_bytes)} are free, a step takes {_mib(budget.peak_step_bytes)} of them and {min_pages} pages "
            f"{_mib(min_pages * page_bytes)}: raise the memory limit, or lower maxModelLength or maxNumBatchedTokens"
        )
    return pages


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
