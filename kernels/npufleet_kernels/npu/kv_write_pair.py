"""Both sides of a layer's new KV by one operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from npufleet_kernels import kv_write_pair
from npufleet_kernels.npu import operators
from npufleet_kernels.npu.constraints import require
from npufleet_kernels.npu.routes import otherwise

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


PAGE_TOKENS = 128


@otherwise("kv_write_pair", kv_write_pair.reference)
def write(kernels: Kernels, key_rows: Tensor, value_rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """See `kv_write_pair.reference`. Rows (K, S, D) are views of pages that lie end to end."""
    slot_count = key_rows.shape[1]
    require(slot_count % PAGE_TOKENS == 0, "npu_scatter_pa_kv_cache", f"{slot_count} slots do not fill pages of {PAGE_TOKENS} tokens")
    pages = [_pages(rows) for rows in (key_rows, value_rows)]
    operators.write_kv_pages(keys, values, pages[0], pages[1], slots)


def _pages(rows: Tensor) -> Tensor:
    heads, slots, size = rows.shape
    by_slot = rows.transpose(0, 1)
    require(by_slot.is_contiguous(), "npu_scatter_pa_kv_cache", "a page does not lie together")
    return by_slot.view(slots // PAGE_TOKENS, PAGE_TOKENS, heads, size)
