"""Keys, or values, of a step's sequences in a paged cache: for operators that follow block tables, and by sequence for all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedRows(Sequence[Tensor]):
    """A sequence of (K, L, D), gathered from its pages when it is asked for; scales are (K, L).

    pages: all pages of the layer, (pages, page tokens, K, D) or (pages, page tokens, K), contiguous. table: (B, most pages) int32, pages of
    each sequence in order, filled up with any. lengths: tokens of each sequence.
    """

    pages: Tensor
    table: Tensor
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> PagedRows: ...

    def __getitem__(self, index: int | slice) -> Tensor | PagedRows:
        if isinstance(index, slice):
            return PagedRows(self.pages, self.table[index], self.lengths[index])
        length = self.lengths[index]
        used = -(-length // self.page_tokens)
        return self.pages.index_select(0, self.table[index, :used]).flatten(0, 1)[:length].transpose(0, 1)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.pages.shape[1]
