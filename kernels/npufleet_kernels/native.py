"""Loads the compiled CPU kernels and chooses their instruction set, once for the process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from npufleet_kernels.build import library, supported_machine
from npufleet_kernels.errors import VariantMissingError

logger = logging.getLogger(__name__)

ISA_ENV = "NPUFLEET_KERNELS"
"""auto, reference, or one of LEVELS."""
LEVELS = ("avx2", "avx512", "avx512_bf16")
"""Instruction sets that there are kernels for, the best last."""
AUTO, REFERENCE = "auto", "reference"


@cache
def levels() -> tuple[str, ...]:
    """Load the library, once; the levels that this CPU can run, the best last. Raises BuildError."""
    torch.ops.load_library(str(library()))  # type: ignore[no-untyped-call] # torch leaves it without annotations
    return tuple(torch.ops.npufleet_cpu.levels())


def wanted() -> str:
    """What the environment asks for. Raises VariantMissingError for a word that means nothing."""
    word = os.environ.get(ISA_ENV, AUTO) or AUTO
    if word not in (AUTO, REFERENCE, *LEVELS):
        raise VariantMissingError(f"{ISA_ENV}: {word[:80]!r} is no choice: use {AUTO}, {REFERENCE}, {', '.join(LEVELS)}")
    return word


def available() -> bool:
    """Whether the CPU kernels are to be used: the machine has some and the environment does not ask for the reference."""
    return supported_machine() and wanted() != REFERENCE


def choose(level: str | None = None) -> str:
    """Make all kernels use `level`; None: what the environment asks for, else the best. Returns it.

    Raises BuildError, and VariantMissingError where the CPU cannot run it.
    """
    found = levels()
    name = level or (found[-1] if wanted() == AUTO and found else wanted())
    if name not in found:
        able = ", ".join(found) or "none of them"
        raise VariantMissingError(f"{name}: this CPU runs kernels for {able}: set {ISA_ENV} to one of these, or to {REFERENCE}")
    torch.ops.npufleet_cpu.choose(name)
    return name


PANEL = 32
"""Columns of the output in a panel (`cpu/kernels.h`)."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer of `rows` outputs, its weight in panels of 32 outputs, as `cpu/kernels.h` describes them.

    segment: rows that are filled up to whole panels together: half of them where gate and up lie end to end. scale (INT8), bias: each
    None or by panels.
    """

    panels: Tensor
    rows: int
    segment: int
    scale: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, x: Tensor, result: torch.dtype) -> Tensor:
        """`x @ weight.T · scale + bias`, summed in float32: x (T, in) float32 or bfloat16, (T, out) in float32 or bfloat16."""
        threads = torch.get_num_threads()
        output: Tensor = torch.ops.npufleet_cpu.linear(x, self.panels, self.rows, self.segment, self.scale, self.bias, result, threads)
        return output


def pack(weight: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, segments: int = 1) -> PackedLinear:
    """Pack a linear layer: weight (out, in) in float32, bfloat16 or int8, scale and bias (out,).

    segments: equal parts of the rows that are filled up to whole panels each.
    """
    rows = weight.shape[0]
    segment = rows // segments
    panels = torch.ops.npufleet_cpu.pack(weight.contiguous(), segment, torch.get_num_threads())
    return PackedLinear(panels, rows, segment, *(None if part is None else _by_panels(part, segment) for part in (scale, bias)))


def _by_panels(vector: Tensor, segment: int) -> Tensor:
    """(out,) as float32, each segment filled up by zeros."""
    parts = vector.to(torch.float32).view(-1, segment)
    return torch.nn.functional.pad(parts, (0, -segment % PANEL)).flatten().contiguous()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`int8.quantise` of a weight (out, in) float32, in one pass; a row with an undefined or infinite element has an undefined scale."""
    values, scales = torch.ops.npufleet_cpu.quantise(weight.contiguous(), torch.get_num_threads())
    return values, scales


def argmax(logits: Tensor) -> Tensor:
    """Index of each row's greatest number, the first of equal ones; NaN is less than any. logits: (N, V) float32. Returns (N,) int64."""
    best: Tensor = torch.ops.npufleet_cpu.argmax(logits)
    return best


def new_stack(*shape: Any) -> Any:
    """A `DecoderStack` of `cpu/binding.cpp`."""
    return torch.classes.npufleet_cpu.DecoderStack(*shape)
