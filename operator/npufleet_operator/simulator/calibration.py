"""Constants of a device from measurements: the efficiencies with which the roofline meets what a benchmark measured.

The file is JSON, such as a benchmark on the device prints:

    {"device": "910B3",
     "constants": {"host_step_seconds": 0.0003},
     "measurements": [
       {"model": "qwen-14b", "npus": 1, "sequences": 16, "context_tokens": 20480, "decode_step_ms": 41.2},
       {"model": "qwen-14b", "npus": 1, "prompt_tokens": 4096, "prefill_ms": 530.0}]}

`constants` replaces constants by name. A measured decode step sets the memory efficiency, a measured prefill the compute efficiency; of
several, the median holds, since one slow sample must not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from npufleet_operator.errors import InputError
from npufleet_operator.simulator.constants import DEVICES, Device
from npufleet_operator.simulator.roofline import Roofline, Work, decode, prefill
from npufleet_operator.simulator.shapes import SHAPES

MAX_FILE_BYTES = 4 * 1024 * 1024
LOWEST_EFFICIENCY = 0.01
Milliseconds = Annotated[float, Field(gt=0, le=10**7, allow_inf_nan=False)]
Constant = Annotated[float, Field(ge=0, le=10**18, allow_inf_nan=False)]


class _Measurement(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str
    npus: Annotated[int, Field(ge=1, le=64)] = 1
    sequences: Annotated[int, Field(ge=1, le=4096)] = 1
    context_tokens: Annotated[int, Field(ge=0, le=10**8)] = 0
    decode_step_ms: Milliseconds | None = None
    prompt_tokens: Annotated[int, Field(ge=1, le=10**7)] = 1
    prefill_ms: Milliseconds | None = None


class _Calibration(BaseModel):
    model_config = ConfigDict(extra="ignore")

    device: str
    constants: dict[str, Constant] = {}
    measurements: Annotated[list[_Measurement], Field(max_length=10_000)] = []


def load_calibration(path: Path) -> Device:
    """The device that the file tells of. Raises InputError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"calibration {path}: larger than {MAX_FILE_BYTES} bytes: give a benchmark's JSON")
        raw = _Calibration.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise InputError(f"calibration {path}: {where}: {first['msg']} (found {str(first['input'])[:100]!r})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"calibration {path}: {str(error)[:200]}: give a benchmark's JSON") from error
    if raw.device not in DEVICES:
        raise InputError(f"calibration {path}: device: {raw.device!r} is unknown: choose one of {', '.join(sorted(DEVICES))}")
    device = DEVICES[raw.device]
    known = {f.name for f in fields(Device)} - {"name"}
    for name, value in raw.constants.items():
        if name not in known:
            raise InputError(f"calibration {path}: constants.{name}: unknown: choose one of {', '.join(sorted(known))}")
        if value <= 0 and not name.endswith("_seconds"):
            raise InputError(f"calibration {path}: constants.{name}: {value} must be above 0")
    return _fitted(_replaced(device, raw.constants), raw.measurements, path)


def _replaced(device: Device, constants: dict[str, float]) -> Device:
    return Device(**{**asdict(device), **constants})


def _fitted(device: Device, measurements: list[_Measurement], path: Path) -> Device:
    memory, compute = [], []
    for index, m in enumerate(measurements):
        where = f"calibration {path}: measurements.{index}"
        if m.model not in SHAPES:
            raise InputError(f"{where}.model: {m.model!r} is unknown: choose one of {', '.join(sorted(SHAPES))}")
        roofline = Roofline(replace(device, memory_efficiency=1.0, compute_efficiency=1.0), SHAPES[m.model], m.npus)
        if m.decode_step_ms is not None:
            memory.append(_efficiency(roofline, decode(m.sequences, m.context_tokens), m.decode_step_ms, roofline.memory_seconds, where))
        if m.prefill_ms is not None:
            compute.append(_efficiency(roofline, prefill(0, m.prompt_tokens), m.prefill_ms, roofline.compute_seconds, where))
    return replace(
        device,
        memory_efficiency=median(memory) if memory else device.memory_efficiency,
        compute_efficiency=median(compute) if compute else device.compute_efficiency,
    )


def _efficiency(roofline: Roofline, work: Work, measured_ms: float, bound: Callable[[Work], float], where: str) -> float:
    """Share of the peak that explains what was measured besides starts and communication."""
    fixed = roofline.step_seconds(work) - max(roofline.compute_seconds(work), roofline.memory_seconds(work))
    left = measured_ms / 1000 - fixed
    efficiency = bound(work) / left if left > 0 else float("inf")
    if not LOWEST_EFFICIENCY <= efficiency <= 1:
        raise InputError(
            f"{where}: {measured_ms} ms means an efficiency of {efficiency:.3g}: it must lie in {LOWEST_EFFICIENCY} to 1; check it"
        )
    return efficiency
