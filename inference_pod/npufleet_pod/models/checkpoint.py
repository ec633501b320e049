"""Reads a model's tensors: from safetensors, one file or sharded with an index, or from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npufleet_pod.errors import ModelError, one_line, shorten
from npufleet_pod.models.config import read_json
from npufleet_pod.models.gguf_config import gguf_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32", "F16", "BF16"}

Part = tuple[slice, ...]
"""A range with start and stop in each of a tensor's first dimensions; what it does not name is whole."""


class TensorSource(Protocol):
    """An open checkpoint of either format; closed on leaving its `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors that are asked for in no other."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...], part: Part = (), *, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, which must have `shape`, or a part of it, in `dtype`; nothing else of it is read. Raises ModelError."""
        ...


def open_checkpoint(model_dir: Path, dtype: torch.dtype, device: torch.device) -> TensorSource:
    """Open the weights in `model_dir`: safetensors where there are any, else a GGUF file. Raises ModelError."""
    gguf = gguf_file(model_dir)
    if gguf is None or (model_dir / SINGLE_FILE).exists() or (model_dir / INDEX_FILE).exists():
        return Checkpoint(model_dir, dtype, device)
    from npufleet_pod.models.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(gguf, dtype, device)


class Checkpoint:
    """An open checkpoint in safetensors. Files stay mapped until it is closed; a tensor is read only when it is asked for."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open every file of the checkpoint in `model_dir`; tensors come in `dtype` on `device`. Raises ModelError."""
        self.dtype = dtype
        self._device = device
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        try:
            for path, names in _layout(model_dir).items():
                self._open(path, names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def tensor(self, name: str, shape: tuple[int, ...], part: Part = (), *, dtype: torch.dtype | None = None) -> Tensor:
        """See TensorSource."""
        path = self._where.get(name)
        if path is None:
            file = next(iter(self._files))
            raise ModelError(f"{file}: tensor {name} is missing: copy the whole checkpoint, and the config.json that belongs to it")
        piece = self._files[path].get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            remedy = "use the config.json that belongs to the weights"
            raise ModelError(f"{path}: tensor {name} has shape {found}, config.json says {shape}: {remedy}")
        if piece.get_dtype() not in FLOAT_DTYPES:
            raise ModelError(f"{path}: tensor {name} is {piece.get_dtype()}: use a checkpoint in {', '.join(sorted(FLOAT_DTYPES))}")
        try:
            tensor: Tensor = piece[part] if part else self._files[path].get_tensor(name)
            return tensor.to(device=self._device, dtype=dtype or self.dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor {name}: {one_line(str(error))}: copy the file again") from error

    def _open(self, path: Path, names: frozenset[str] | None) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt")
            present = set(file.keys())
        except FileNotFoundError as error:
            raise ModelError(f"{path}: no such file, though {INDEX_FILE} names it: copy the whole checkpoint") from error
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or one_line(str(error))}: give the pod's user access to the volume") from error
        except SafetensorError as error:
            raise ModelError(f"{path}: truncated, or not a safetensors file ({one_line(str(error))}): copy the file again") from error
        absent = sorted((names or frozenset()) - present)
        if absent:
            raise ModelError(f"{path}: tensor {absent[0]} is missing, though {INDEX_FILE} names it: copy the whole checkpoint")
        self._files[path] = file
        self._where.update(dict.fromkeys(present if names is None else names, path))


def _layout(model_dir: Path) -> Mapping[Path, frozenset[str] | None]:
    """The checkpoint's files, each with the tensors that the index expects there; None: whatever it holds."""
    index = model_dir / INDEX_FILE
    single = model_dir / SINGLE_FILE
    if single.exists():
        return {single: None}
    if not index.exists():
        others = sorted(path.name for pattern in ("*.bin", "*.pt") for path in model_dir.glob(pattern))
        seen = f" (found {shorten(others[0])}, which is not read)" if others else ""
        raise ModelError(f"{single}: no such file{seen}: copy the model's safetensors files into {model_dir}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty: copy the file again")
    shards: dict[Path, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index}: weight_map: {shorten(shard)} is not a file name beside it: copy the file again")
        shards.setdefault(model_dir / shard, set()).add(name)
    return {path: frozenset(names) for path, names in shards.items()}
