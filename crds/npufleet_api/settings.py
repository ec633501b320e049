"""Settings files that the operator writes and the pod reads. The operator resolves profile and overrides; the pod only obeys."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

from npufleet_api.contract import KV_CACHE_DIR
from npufleet_api.model import BlockSize, Dtype, EngineProfile, Preemption, SchedulingPolicy, ToolCallFormat
from npufleet_api.pool import AlertThresholds, Device
from npufleet_api.precision import KvCacheDtype, WeightDtype

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class SettingsModel(BaseModel):
    """A frozen part of a settings file; an unknown field is an error, since it would be ignored silently."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class ShutdownSettings(SettingsModel):
    """What the engine does after SIGTERM."""

    accept_seconds: float = Field(default=5, ge=0, le=60, description="Keeps accepting while endpoints change.")
    drain_seconds: float = Field(default=120, ge=0, le=3600, description="Lets running requests finish.")


class LayerPrecisionSettings(SettingsModel):
    """Types of layers `first` to `last`, counted from 0; None: those of all layers."""

    first: int = Field(ge=0, le=1023)
    last: int = Field(ge=0, le=1023)
    attention: WeightDtype | None = None
    feed_forward: WeightDtype | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.first > self.last:
            raise ValueError(f"first: {self.first} is above last {self.last}: swap them")
        return self


class PrecisionSettings(SettingsModel):
    """Types by role; Auto is the engine's dtype."""

    attention: WeightDtype = WeightDtype.AUTO
    feed_forward: WeightDtype = WeightDtype.AUTO
    output: WeightDtype = WeightDtype.AUTO
    kv_cache: KvCacheDtype = KvCacheDtype.AUTO
    layers: list[LayerPrecisionSettings] = Field(default=[], max_length=64, description="Of several that name a layer, the last counts.")


class EngineSettings(SettingsModel):
    """`engine.yaml`: everything that the engine container needs to know."""

    model_path: Name = Field(description="Directory with config.json, tokenizer.json and safetensors.")
    served_name: Name
    aliases: list[Name] = Field(default=[], max_length=8, description="Further names of the model, such as namespace/name.")
    device: Device = Device.NPU
    profile: EngineProfile = EngineProfile.BALANCED
    dtype: Dtype = Dtype.AUTO
    precision: PrecisionSettings = PrecisionSettings()
    calibration_path: Name | None = Field(default=None, description="File of `npufleet-pod calibrate`; goes before the profile.")
    max_model_length: int | None = Field(default=None, ge=16, le=10485760, description="Tokens; unset is the model's own limit.")
    max_num_sequences: int = Field(default=64, ge=1, le=4096)
    max_num_batched_tokens: int = Field(default=4096, ge=16, le=1048576)
    max_queued_requests: int = Field(default=256, ge=1, le=100000)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, le=1024**3)
    block_size: BlockSize = Field(default=BlockSize.TOKENS_32, description="Tokens of a KV block.")
    chunked_prefill: bool = Field(default=True, description="Prompts may be computed in parts; off, only those longer than a step are.")
    preemption: Preemption = Preemption.AGGRESSIVE
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.LATENCY_OPTIMISED
    starvation_steps: int = Field(default=256, ge=1, le=1000000, description="Steps after which a waiting request goes before all others.")
    pipeline_depth: int = Field(default=2, ge=1, le=4, description="Steps in flight at once.")
    asynchronous_execution: bool = Field(default=True, description="Off, one step follows the other whatever pipelineDepth says.")
    continuous_memory: bool = Field(default=True, description="A request's KV lies in adjacent memory where there is room.")
    fusion_level: int = Field(default=2, ge=1, le=3, description="1 pairs of operators, 2 half layers, 3 whole layers.")
    prefix_cache: bool = Field(default=True, description="KV of equal beginnings of prompts is kept and shared.")
    host_cache_mi: int = Field(default=0, ge=0, le=4194304, description="MiB of host memory for KV that left the device.")
    disk_cache_mi: int = Field(default=0, ge=0, le=67108864, description="MiB of disk for KV that left the host's memory.")
    disk_cache_path: Name = Field(default=KV_CACHE_DIR, description="Directory of KV on disk; emptied at start.")
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    rank_timeout_seconds: float = Field(default=60, ge=1, le=3600, description="A rank without progress for so long ends the replica.")
    cpu_threads: int | None = Field(default=None, ge=1, le=1024, description="Compute threads; unset is the container's CPU limit.")
    tool_format: ToolCallFormat = ToolCallFormat.AUTO
    heartbeat_seconds: float = Field(default=15, ge=0.05, le=600, description="A stream that is silent for so long gets a comment.")
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    shutdown: ShutdownSettings = ShutdownSettings()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if self.served_name in self.aliases:
            raise ValueError(f"aliases repeats servedName {self.served_name!r}: remove it there")
        return self

    @model_validator(mode="after")
    def _disk_is_behind_memory(self) -> Self:
        if self.disk_cache_mi and not self.host_cache_mi:
            raise ValueError(f"diskCacheMi: {self.disk_cache_mi} needs hostCacheMi, through which KV reaches the disk: set it too")
        return self

    @model_validator(mode="after")
    def _chosen_heads_are_named(self) -> Self:
        if self.precision.kv_cache is KvCacheDtype.INT8_HEADS and self.calibration_path is None:
            raise ValueError("precision.kvCache: Int8Heads needs calibrationPath, whose file names heads: set it, or choose Int8")
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
