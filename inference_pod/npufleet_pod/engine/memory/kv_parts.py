"""The tensors that the KV cache is made of: which layers and heads lie together, in which shape, and what a page of each takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from npufleet_pod.engine.memory.layout import CacheLayout


class PageOrder(Enum):
    """How a layer's keys, or values, lie in memory."""

    HEAD_MAJOR = auto()
    """(K, pages, page_tokens, D): one head's keys lie together over adjacent pages, as a CPU reads them."""
    PAGE_MAJOR = auto()
    """(pages, page_tokens, K, D): a page lies together, as the NPU's paged attention takes it."""


class PartKind(Enum):
    """What a part holds."""

    FLOAT = auto()
    """Keys and values as they are computed."""
    SCALE = auto()
    """Scales of those that are INT8: the order's shape without D."""
    INT8 = auto()


@dataclass(frozen=True, slots=True)
class KVPart:
    """One tensor: keys and values of `layers`, which have the same number of heads in it. Shape (2, layers, *the order's)."""

    kind: PartKind
    layers: tuple[int, ...]
    kv_heads: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    page_axis: int

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def page_shape(self) -> tuple[int, ...]:
        """The shape without pages."""
        return self.shape[: self.page_axis] + self.shape[self.page_axis + 1 :]

    @property
    def page_bytes(self) -> int:
        """Of one page."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    def page(self, whole: Tensor, page: int) -> Tensor:
        """One page of this part's tensor."""
        return whole.select(self.page_axis, page)


def plan_parts(
    layout: CacheLayout, float_heads: Sequence[int], int8_heads: Sequence[int], head_size: int, dtype: torch.dtype, order: PageOrder
) -> list[KVPart]:
    """Parts for layers with so many heads of either kind; as few as there are different numbers: one where all heads are alike.

    Those with larger elements come first, so that each begins at a multiple of its element in a page whose parts lie end to end.
    """
    kinds = (
        (PartKind.FLOAT, float_heads, dtype, (head_size,)),
        (PartKind.SCALE, int8_heads, torch.float32, ()),
        (PartKind.INT8, int8_heads, torch.int8, (head_size,)),
    )
    parts = []
    for kind, heads, own_dtype, element in kinds:
        for count in sorted({*heads} - {0}):
            layers = tuple(layer for layer, own in enumerate(heads) if own == count)
            pages, tokens = layout.page_count, layout.page_tokens
            slots = (count, pages, tokens) if order is PageOrder.HEAD_MAJOR else (pages, tokens, count)
            axis = 3 if order is PageOrder.HEAD_MAJOR else 2
            parts.append(KVPart(kind, layers, count, own_dtype, (2, len(layers), *slots, *element), axis))
    return sorted(parts, key=lambda part: -part.dtype.itemsize)
