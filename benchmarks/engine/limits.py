"""What the machine can do at best: reading memory, and multiplying matrices by the best of what is at hand."""

from __future__ import annotations

import time
from collections.abc import Callable

READ_BYTES = 1 << 30
SIDE = 2048


def measure(threads: int) -> dict[str, float]:
    """memory_read_gb_s; matmul TFLOP/s of torch in float32 and bfloat16, and of the kernels' bfloat16; flop_s: the most of these."""
    import torch

    from npufleet_kernels import native

    torch.set_num_threads(threads)
    found = {"threads": float(threads), "memory_read_gb_s": round(READ_BYTES / best(torch.ones(READ_BYTES // 4).sum) / 1e9, 1)}
    work = 2.0 * SIDE**3
    for name, dtype in (("torch_f32", torch.float32), ("torch_bf16", torch.bfloat16)):
        a = torch.randn(SIDE, SIDE).to(dtype)
        found[f"matmul_{name}_tflop_s"] = round(work / best(lambda a=a: a @ a) / 1e12, 3)  # type: ignore[misc] # the loop's own matrix
    if native.available():
        native.choose()
        a = torch.randn(SIDE, SIDE).to(torch.bfloat16)
        packed = native.pack(a)
        found["matmul_npufleet_bf16_tflop_s"] = round(work / best(lambda: packed(a, torch.bfloat16)) / 1e12, 3)
    found["matmul_tflop_s"] = max(value for name, value in found.items() if name.startswith("matmul_"))
    return found


def best(work: Callable[[], object], rounds: int = 7) -> float:
    """Seconds of the fastest of so many calls."""
    least = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least
