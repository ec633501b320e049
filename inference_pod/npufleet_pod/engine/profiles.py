"""From the settings file to how the engine schedules. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from npufleet_api.calibration import Calibration
from npufleet_api.profiles import PROFILES
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.fusion import FusionThresholds
from npufleet_pod.engine.scheduler import SchedulerPolicy


def with_profile(settings: EngineSettings, calibration: Calibration | None = None) -> EngineSettings:
    """Let the calibration, then the profile that a settings file names, say what the file leaves out.

    The operator's files leave nothing out but what a calibration is to say.
    """
    values = asdict(PROFILES[settings.profile]) if "profile" in settings.model_fields_set else {}
    if calibration is not None and calibration.batch is not None:
        values["max_num_sequences"] = calibration.batch.max_num_sequences
    return settings.model_copy(update={name: value for name, value in values.items() if name not in settings.model_fields_set})


def fusion_thresholds(calibration: Calibration | None) -> FusionThresholds:
    """What the calibration measured, else the defaults."""
    if calibration is None or calibration.fusion is None:
        return FusionThresholds()
    return FusionThresholds(calibration.fusion.full_tokens, calibration.fusion.two_phase_tokens)


def scheduler_policy(settings: EngineSettings) -> SchedulerPolicy:
    """Who goes first, and how many steps are in flight."""
    return SchedulerPolicy(
        chunked_prefill=settings.chunked_prefill,
        preemption=settings.preemption,
        policy=settings.scheduling_policy,
        starvation_steps=settings.starvation_steps,
        continuous_memory=settings.continuous_memory,
        steps_in_flight=settings.pipeline_depth if settings.asynchronous_execution else 1,
    )
