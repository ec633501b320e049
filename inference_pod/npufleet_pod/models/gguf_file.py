"""Reads the header of a GGUF file, llama.cpp's format: metadata and where each tensor lies. Imports no torch.

Format: the specification in ggml's repository, docs/gguf.md, versions 2 and 3, little-endian. Every count in the file is checked
against the bytes that are left, so that a damaged one ends in an error and not in endless reading.
"""

from __future__ import annotations

import math
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

    def read(self, name: str, index: int | None = None, part: tuple[slice, ...] = ()) -> NDArray[np.float32]:
        """The tensor `name`, or its element `index` along the first dimension, in float32, whatever it is stored in.

        part: a range of its rows, or of rows and columns, of a vector or matrix; of each row the blocks that hold the columns are read.
        Raises ModelError for a quantisation that is not known.
        """
        tensor = self.tensors[name]
        shape, offset = tensor.shape, tensor.offset
        if index is not None:
            shape = shape[1:]
            offset += index * (tensor.size_bytes // tensor.shape[0])
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows, columns = _ranges(shape, part)
        first, last = columns.start // block, -(-columns.stop // block)
        row_bytes = shape[-1] // block * block_bytes
        if columns.stop - columns.start == shape[-1]:
            data = self._map[offset + rows.start * row_bytes : offset + rows.stop * row_bytes]
        else:
            starts = range(offset + rows.start * row_bytes, offset + rows.stop * row_bytes, row_bytes)
            data = b"".join(self._map[start + first * block_bytes : start + last * block_bytes] for start in starts)
        raw = np.frombuffer(data, dtype=np.uint8)
        try:
            values = _widen(raw, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} is {tensor.kind.name}, which is not read: use another quantisation") from error
        values = values.reshape(rows.stop - rows.start, -1)[:, columns.start - first * block : columns.stop - first * block]
        return values.reshape(tuple(piece.stop - piece.start for piece in part) + shape[len(part) :])


def _ranges(shape: tuple[int, ...], part: tuple[slice, ...]) -> tuple[slice, slice]:
    """(rows, columns) of `part`, where all dimensions but the last are rows; a vector is one row."""
    if not part:
        return slice(0, math.prod(shape[:-1])), slice(0, shape[-1])
    ranges = [*part, *(slice(0, size) for size in shape[len(part) :])]
    return (slice(0, 1) if len(shape) == 1 else ranges[0]), ranges[-1]


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
