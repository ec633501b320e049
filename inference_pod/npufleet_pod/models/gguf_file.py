"""Reads the header of a GGUF file, llama.cpp's format: metadata and where each tensor lies. Imports no torch.

Format: the specification in ggml's repository, docs/gguf.md, versions 2 and 3, little-endian. Every count in the file is checked
against the bytes that are left, so that a damaged one ends in an error and not in endless reading.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from npufleet_pod.errors import ModelError, one_line, shorten

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct format of each scalar type of the metadata."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its shape in torch's order, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size_bytes: int


class GgufFile:
    """An open GGUF file, mapped until it is closed."""

    def __init__(self, path: Path) -> None:
        """Map `path` and read its header. Raises ModelError."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}: give the pod's user access to the volume") from error
        except ValueError as error:
            raise ModelError(f"{path}: the file is empty: copy the file again") from error
        try:
            self.metadata, self.tensors = _Header(self._map).read()
        except (struct.error, ValueError) as error:
            self.close()
            raise ModelError(f"{path}: truncated, or not a GGUF file ({one_line(str(error))}): copy the file again") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def read(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """The tensor `name`, or its part `index` along the first dimension, in float32, whatever it is stored in.

        Raises ModelError for a quantisation that is not known.
        """
        tensor = self.tensors[name]
        shape, offset, size_bytes = tensor.shape, tensor.offset, tensor.size_bytes
        if index is not None:
            shape, size_bytes = shape[1:], size_bytes // shape[0]
            offset += index * size_bytes
        raw = np.frombuffer(self._map[offset : offset + size_bytes], dtype=np.uint8)
        try:
            values = _widen(raw, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} is {tensor.kind.name}, which is not read: use another quantisation") from error
        return values.reshape(shape)


def _widen(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32)
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32)
    _, block_bytes = GGML_QUANT_SIZES[kind]
    return np.asarray(dequantize(raw.reshape(-1, block_bytes), kind), dtype=np.float32)


class _Header:
    """Reads from the start of a mapped file. Raises struct.error or ValueError for what does not fit the format."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[Mapping[str, Any], Mapping[str, GgufTensor]]:
        if self._data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, or of the other byte order")
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        self._check_count(tensor_count + entry_count, 1)
        metadata = {}
        for _ in range(entry_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {shorten(alignment)}")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in described:
            tensors[name] = self._place(name, shape, kind, start + offset)
        return metadata, tensors

    def _place(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in shape:
            elements *= size
        if not shape or elements < 1 or shape[-1] % block:
            raise ValueError(f"tensor {shorten(name)} has shape {shape} in {kind.name}")
        size_bytes = elements // block * block_bytes
        if offset + size_bytes > len(self._data):
            raise ValueError(f"tensor {shorten(name)} lies beyond the end of the file")
        return GgufTensor(name, shape, kind, offset, size_bytes)

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dimensions = self._scalar("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {shorten(name)} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        return name, shape[::-1], GGMLQuantizationType(self._scalar("<I")), self._scalar("<Q")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalar(self._format(kind))
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item == STRING:
            self._check_count(count, 8)
            return [self._string() for _ in range(count)]
        form = self._format(item)
        width = struct.calcsize(form)
        self._check_count(count, width)
        values = np.frombuffer(self._data[self._at : self._at + count * width], dtype=np.dtype(form.replace("b", "i1").replace("B", "u1")))
        self._at += count * width
        return values.tolist()

    def _format(self, kind: int) -> str:
        if kind not in SCALARS:
            raise ValueError(f"metadata of type {kind}")
        return SCALARS[kind]

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._check_count(length, 1)
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8", errors="replace")

    def _check_count(self, count: int, width: int) -> None:
        if count * width > len(self._data) - self._at:
            raise ValueError(f"{count} items where {len(self._data) - self._at} bytes are left")
