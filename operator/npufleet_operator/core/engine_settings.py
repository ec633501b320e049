"""Profile and overrides resolved into the settings that an engine reads."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction
from math import ceil
from typing import Any

from npufleet_api.contract import CALIBRATION_DIR, CALIBRATION_FILE
from npufleet_api.model import AscendModelSpec, Dtype, ResolvedEngine
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.profiles import PROFILES
from npufleet_api.settings import EngineSettings, PrecisionSettings, ShutdownSettings
from npufleet_operator.core.objects.source import model_dir

OPTIONAL_OVERRIDES = (
    "starvation_steps",
    "prefix_cache",
    "host_cache_mi",
    "disk_cache_mi",
    "tool_format",
)
"""Overrides whose default is that of EngineSettings, whatever the profile."""
CALIBRATED = ("max_num_sequences",)
"""Fields that a calibration says where the model does not: the settings file leaves them out then, and the engine fills them in."""


SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{name: Fraction(1000) ** (power + 1) for power, name in enumerate("kMGT")},
    **{name: Fraction(1024) ** (power + 1) for power, name in enumerate(("Ki", "Mi", "Gi", "Ti"))},
}
MAX_CPU_THREADS = 1024


def whole_cpus(quantity: str) -> int:
    """A CPU quantity as whole CPUs, rounded up, at least 1: a pod that asked for half a CPU still needs a thread to compute on."""
    number = quantity.rstrip("mkKMGTi")
    return max(1, ceil(Fraction(number) * SUFFIXES[quantity[len(number) :]]))


def engine_settings(namespace: str, name: str, spec: AscendModelSpec, pool: InferencePoolSpec) -> EngineSettings:
    """The settings file of a model's engines."""
    engine = spec.engine
    profile = asdict(PROFILES[engine.profile])
    asked = {name: value for name in (*profile, *OPTIONAL_OVERRIDES) if (value := getattr(engine, name)) is not None}
    if engine.calibration_ref is not None:
        profile = {name: value for name, value in profile.items() if name not in CALIBRATED}
    served = spec.model.served_name or name
    qualified = f"{namespace}/{name}"
    return EngineSettings(
        model_path=model_dir(spec),
        served_name=served,
        aliases=[] if qualified == served else [qualified],
        device=pool.pod_template.device,
        profile=engine.profile,
        dtype=engine.dtype or Dtype.AUTO,
        precision=PrecisionSettings(**engine.precision.model_dump(exclude_none=True)) if engine.precision else PrecisionSettings(),
        calibration_path=f"{CALIBRATION_DIR}/{CALIBRATION_FILE}" if engine.calibration_ref else None,
        max_model_length=engine.max_model_length,
        max_queued_requests=engine.max_queued_requests or 256,
        tensor_parallel=spec.parallelism.tensor,
        cpu_threads=min(MAX_CPU_THREADS, whole_cpus(spec.resources.cpu)),
        shutdown=ShutdownSettings(drain_seconds=pool.rebalancing.drain_seconds),
        **{**profile, **asked},
    )


def settings_document(settings: EngineSettings) -> dict[str, Any]:
    """The settings file's content: everything but what a calibration is to say, so that it does not depend on the engine's own defaults."""
    left_out = {name for name in CALIBRATED if name not in settings.model_fields_set}
    return settings.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=left_out)


def resolved(settings: EngineSettings) -> ResolvedEngine:
    """What the model's status shows of its engine settings."""
    return ResolvedEngine(
        profile=settings.profile,
        device=settings.device.value,
        dtype=settings.dtype,
        max_model_length=settings.max_model_length,
        max_num_sequences=settings.max_num_sequences if "max_num_sequences" in settings.model_fields_set else None,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        chunked_prefill=settings.chunked_prefill,
        preemption=settings.preemption,
        scheduling_policy=settings.scheduling_policy,
        pipeline_depth=settings.pipeline_depth if settings.asynchronous_execution else 1,
    )
