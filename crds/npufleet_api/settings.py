"""Settings files that the operator writes and the pod reads. The operator resolves profile and overrides; the pod only obeys."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from npufleet_api.model import Dtype, EngineProfile
from npufleet_api.pool import AlertThresholds, Device

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class SettingsModel(BaseModel):
    """A frozen part of a settings file; an unknown field is an error, since it would be ignored silently."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class ShutdownSettings(SettingsModel):
    """What the engine does after SIGTERM."""

    accept_seconds: float = Field(default=5, ge=0, le=60, description="Keeps accepting while endpoints change.")
    drain_seconds: float = Field(default=120, ge=0, le=3600, description="Lets running requests finish.")


class EngineSettings(SettingsModel):
    """`engine.yaml`: everything that the engine container needs to know."""

    model_path: Name = Field(description="Directory with config.json, tokenizer.json and safetensors.")
    served_name: Name
    aliases: list[Name] = Field(default=[], max_length=8, description="Further names of the model, such as namespace/name.")
    device: Device = Device.NPU
    profile: EngineProfile = EngineProfile.BALANCED
    dtype: Dtype = Dtype.AUTO
    max_model_length: int | None = Field(default=None, ge=16, le=10485760, description="Tokens; unset is the model's own limit.")
    max_num_sequences: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=4096, ge=16, le=1048576)
    max_queued_requests: int = Field(default=256, ge=1, le=100000)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, le=1024**3)
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    cpu_threads: int | None = Field(default=None, ge=1, le=1024, description="Compute threads; unset is the container's CPU limit.")
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    shutdown: ShutdownSettings = ShutdownSettings()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.served_name in self.aliases:
            raise ValueError(f"aliases repeats servedName {self.served_name!r}: remove it there")
        return self


class MonitorSettings(SettingsModel):
    """`monitor.yaml`: read again whenever it changes."""

    pool: Name
    model_namespace: Name
    model_name: Name
    served_name: Name
    workload_class: Name
    device: Device = Device.NPU
    scrape_interval_seconds: float = Field(default=2, ge=0.2, le=60)
    alerts: AlertThresholds = AlertThresholds()
