"""From the settings file to how the engine schedules. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict

from npufleet_api.profiles import PROFILES
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.scheduler import SchedulerPolicy


def with_profile(settings: EngineSettings) -> EngineSettings:
    """Let the profile that a settings file names say what the file leaves out. The operator's files leave nothing out."""
    if "profile" not in settings.model_fields_set:
        return settings
    profile = asdict(PROFILES[settings.profile])
    return settings.model_copy(update={name: value for name, value in profile.items() if name not in settings.model_fields_set})


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
