"""Tensors of a GGUF file under the names and in the row order of the hub's checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from npufleet_pod.errors import ModelError
from npufleet_pod.models.checkpoint import Part
from npufleet_pod.models.gguf_file import GgufFile

LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT_TENSOR = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")
TOP_NAMES: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
INTERLEAVED = ("attn_q", "attn_k")
"""Projections whose rows llama.cpp reorders in Llama models, so that the elements of a rotated pair lie side by side."""


class GgufCheckpoint:
    """An open GGUF file; a tensor is read, and widened, only when it is asked for."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open `path`; tensors come in `dtype` on `device`. Raises ModelError."""
        self._file = GgufFile(path)
        self.dtype = dtype
        self._device = device
        metadata = self._file.metadata
        heads = metadata.get("llama.attention.head_count", 0)
        self._heads = {"attn_q": heads, "attn_k": metadata.get("llama.attention.head_count_kv", heads)}
        self._interleaved = metadata.get("general.architecture") == "llama"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def tensor(self, name: str, shape: tuple[int, ...], part: Part = (), *, dtype: torch.dtype | None = None) -> Tensor:
        """See TensorSource; `name` is the hub's. The part of a projection whose rows are reordered must begin and end with a head."""
        own, expert = _own_name(name)
        found = self._shape(own, expert)
        squeezed = found != shape and math.prod(found) == math.prod(shape) and 1 in shape
        if found != shape and not squeezed:
            remedy = "use the config.json that belongs to the weights"
            raise ModelError(f"{self._file.path}: tensor {own} has shape {found}, the configuration says {shape}: {remedy}")
        if squeezed:
            values = self._file.read(own, expert).reshape(shape)[part]
        else:
            values = self._restore_rows(own, found, self._file.read(own, expert, part))
        # torch.from_numpy shares the array, which may be a view of the mapped file; a tensor of its own outlives it.
        return torch.tensor(values, dtype=dtype or self.dtype, device=self._device)

    def _shape(self, own: str, expert: int | None) -> tuple[int, ...]:
        tensor = self._file.tensors.get(own)
        if tensor is None:
            raise ModelError(f"{self._file.path}: tensor {own} is missing: use a GGUF file of the whole model")
        if expert is not None and (len(tensor.shape) < 2 or expert >= tensor.shape[0]):
            raise ModelError(f"{self._file.path}: tensor {own} has shape {tensor.shape}, the configuration names expert {expert}")
        return tensor.shape if expert is None else tensor.shape[1:]

    def _restore_rows(self, own: str, whole: tuple[int, ...], values: NDArray[np.float32]) -> NDArray[np.float32]:
        kind = own.split(".")[2] if own.startswith("blk.") else ""
        heads = self._heads.get(kind, 0)
        if not self._interleaved or kind not in INTERLEAVED or heads < 1 or whole[0] % (2 * heads):
            return values
        size = whole[0] // heads
        rows = values.reshape(values.shape[0] // size, size // 2, 2, -1)
        return rows.swapaxes(1, 2).reshape(values.shape)


def _own_name(name: str) -> tuple[str, int | None]:
    """(the GGUF file's name of a tensor, the expert's number where the tensor holds many)."""
    layer = LAYER_TENSOR.fullmatch(name)
    if layer is None:
        return TOP_NAMES.get(name, name), None
    expert = EXPERT_TENSOR.fullmatch(layer[2])
    if expert is not None:
        return f"blk.{layer[1]}.ffn_{expert[2]}_exps.{layer[3]}", int(expert[1])
    return f"blk.{layer[1]}.{LAYER_NAMES.get(layer[2], layer[2])}.{layer[3]}", None
