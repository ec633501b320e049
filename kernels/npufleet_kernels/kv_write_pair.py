"""Stores new keys and values of a layer in the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from npufleet_kernels.dispatch import Kernels


def reference(kernels: Kernels, key_rows: Tensor, value_rows: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """`kv_write` of both sides."""
    kernels.kv_write(key_rows, slots, keys)
    kernels.kv_write(value_rows, slots, values)
