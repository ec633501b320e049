"""How many pages of KV a device holds, from what is measured once the weights are loaded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npufleet_pod.engine.memory.errors import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory that is left for KV.

    free_bytes: measured after loading and a warm-up step. peak_step_bytes: what the largest step took beyond that while it ran, measured.
    share: of the rest, what is given to KV, over 0 up to 1; the remainder is for what nobody measured.
    """

    free_bytes: int
    peak_step_bytes: int
    share: float

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV."""
        return max(0, int((self.free_bytes - self.peak_step_bytes) * self.share))


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
