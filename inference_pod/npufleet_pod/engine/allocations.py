"""What torch allocates on the CPU while a piece of work runs, and the most that it held at one moment.

torch's allocator is asked through its older profiler: it is exact to the byte, begins in a millisecond, and prints nothing. What libraries
take without torch (packed weights of matrix products, for example) shows only in the process's own peak, so callers look at both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROCESS = Path("/proc/self")


@dataclass(slots=True)
class Allocations:
    """Filled when the work is done. Bytes beyond what was held before; `activation_bytes + scratch_bytes == peak_bytes`."""

    peak_bytes: int = 0
    activation_bytes: int = 0
    """Of the peak, what was handed from one operation to another."""
    scratch_bytes: int = 0
    """Of the peak, what the operation that ran took for itself and gave back."""
    held_bytes: int = 0
    """What is still held at the end."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that work took at one moment: through torch, and beside it, as far as that is known."""

    allocated_bytes: int
    beside_bytes: int = 0


@contextlib.contextmanager
def record_allocations() -> Iterator[Allocations]:
    """Record what this thread's work inside allocates through torch. Not to be nested."""
    found = Allocations()
    profiler: Any = torch.autograd  # the older profiler is not among the names that torch exports
    # Of the flags, only the second is wanted: memory.
    flags = (False, True, False, False, False)
    profiler._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *flags, torch._C._profiler._ExperimentalConfig()))
    try:
        yield found
    finally:
        events = [event for thread in profiler._disable_profiler_legacy() for event in thread]
        _account(found, [_Moment(event.kind(), event.cpu_memory_usage() if event.kind() == "memory_alloc" else 0) for event in events])


@dataclass(frozen=True, slots=True)
class _Moment:
    kind: str
    """push and pop enclose an operation; memory_alloc is an allocation, or one that is given back."""
    size_bytes: int


def _account(found: Allocations, moments: list[_Moment]) -> None:
    """Operations are those that no other encloses: what passes between them is an activation, what one takes beyond is scratch."""
    depth = live = before = inner_peak = 0
    for moment in moments:
        if moment.kind == "push":
            if depth == 0:
                before = inner_peak = live
            depth += 1
        elif moment.kind == "pop":
            depth -= 1
            if depth == 0 and inner_peak > found.peak_bytes:
                found.peak_bytes, found.activation_bytes = inner_peak, max(before, live, 0)
        elif moment.kind == "memory_alloc":
            live += moment.size_bytes
            inner_peak = max(inner_peak, live)
            if depth == 0 and live > found.peak_bytes:
                found.peak_bytes = found.activation_bytes = live
    found.scratch_bytes = found.peak_bytes - found.activation_bytes
    found.held_bytes = live


def forget_process_peak() -> int | None:
    """Let the kernel count the process's peak anew (proc(5), clear_refs); the bytes resident now, or None where that is not allowed."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return None
    return process_peak()


def process_peak() -> int | None:
    """Most bytes that were resident since the peak was forgotten; None where the kernel does not tell."""
    try:
        status = (PROCESS / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
