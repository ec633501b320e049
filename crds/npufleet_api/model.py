"""`AscendModel`: one model that a team wants served. Namespaced, and narrow: no host path, no security context."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from npufleet_api.conditions import Condition, ConditionList
from npufleet_api.pool import Decision
from npufleet_api.precision import PrecisionOverrides
from npufleet_api.schema import (
    LIST_ATOMIC,
    LIST_SET,
    ApiModel,
    Change,
    Digest,
    DnsLabel,
    DnsSubdomain,
    EndpointUrl,
    ImageRef,
    Percent,
    Quantity,
    Region,
    Text,
    Timestamp,
    cel,
    list_map,
    spec_field,
    validations,
)
from npufleet_api.sources import URI_RULES

_CEL_RULES = {scheme: rule.replace("\\", "\\\\") for scheme, rule in URI_RULES.items()}


class RuntimeName(StrEnum):
    """Which engine serves the model."""

    NATIVE = "Native"
    VLLM_ASCEND = "VLLMAscend"


class EngineProfile(StrEnum):
    """A named set of engine settings."""

    HIGH_CONCURRENCY_CHAT = "HighConcurrencyChat"
    BATCH_DOCUMENT_PROCESSING = "BatchDocumentProcessing"
    BALANCED = "Balanced"


class Dtype(StrEnum):
    """Type of weights and activations; Auto takes the checkpoint's."""

    AUTO = "Auto"
    FLOAT32 = "Float32"
    BFLOAT16 = "BFloat16"
    FLOAT16 = "Float16"


class BlockSize(IntEnum):
    """Tokens of a KV block: what is shared, cached and counted."""

    TOKENS_16 = 16
    TOKENS_32 = 32
    TOKENS_64 = 64
    TOKENS_128 = 128


class Preemption(StrEnum):
    """Aggressive admits what fits now and lets newcomers take memory from running requests; Conservative admits only what can finish."""

    AGGRESSIVE = "Aggressive"
    CONSERVATIVE = "Conservative"


class SchedulingPolicy(StrEnum):
    """LatencyOptimised computes next tokens before prompts, ThroughputOptimised prompts first, so that batches are full."""

    LATENCY_OPTIMISED = "LatencyOptimised"
    THROUGHPUT_OPTIMISED = "ThroughputOptimised"


class ToolCallFormat(StrEnum):
    """How a model writes calls of tools; Auto goes by its chat template."""

    AUTO = "Auto"
    HERMES = "Hermes"
    LLAMA = "Llama"


class Rollout(StrEnum):
    """How a new revision replaces the old one."""

    ROLLING_UPDATE = "RollingUpdate"
    RECREATE = "Recreate"


class PoolRef(ApiModel):
    """The pool that the model runs in."""

    name: DnsSubdomain


class SecretRef(ApiModel):
    """A Secret in the model's own namespace."""

    name: DnsSubdomain


class ModelSource(ApiModel):
    """Where the weights come from and what clients call the model."""

    uri: Annotated[str, StringConstraints(min_length=7, max_length=512)] = spec_field(
        "hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PATH, obs://BUCKET/PATH, oci://IMAGE or pvc://CLAIM/PATH.",
        Change.ROLLS,
        json_schema_extra=validations(
            cel(
                " || ".join(f"self.startsWith('{scheme}://')" for scheme in URI_RULES),
                "model.uri has an unknown scheme: write hf://ORG/NAME, ms://ORG/NAME, s3://BUCKET/PATH, obs://BUCKET/PATH, oci://IMAGE "
                "or pvc://CLAIM/PATH",
            ),
            cel(
                f"!self.startsWith('pvc://') || self.matches('{_CEL_RULES['pvc']}')",
                "model.uri is not a volume path: write pvc://CLAIM or pvc://CLAIM/PATH, with a claim of the model's namespace",
            ),
            cel(
                f"!(self.startsWith('hf://') || self.startsWith('ms://')) || self.matches('{_CEL_RULES['hf']}') || "
                f"self.matches('{_CEL_RULES['ms']}')",
                "model.uri is not a repository of a hub: write hf://ORG/NAME or ms://ORG/NAME",
            ),
            cel(
                f"!(self.startsWith('s3://') || self.startsWith('obs://')) || self.matches('{_CEL_RULES['s3']}') || "
                f"self.matches('{_CEL_RULES['obs']}')",
                "model.uri is not a path in a bucket: write s3://BUCKET/PATH or obs://BUCKET/PATH",
            ),
            cel(
                f"!self.startsWith('oci://') || self.matches('{_CEL_RULES['oci']}')",
                "model.uri is not an image: write oci://REGISTRY/NAME:TAG or oci://REGISTRY/NAME@sha256:DIGEST",
            ),
            cel(
                "!self.contains('/../') && !self.endsWith('/..')",
                "model.uri has a .. in its path: write the path from the volume's root without it",
            ),
        ),
    )
    revision: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = spec_field(
        "Branch, tag or commit of the source.", Change.ROLLS, default=None
    )
    served_name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.:/]*$")] | None = (
        spec_field("Name that clients send as model; the resource's name by default. Unique in a pool.", Change.ROLLS, default=None)
    )
    secret_ref: SecretRef | None = spec_field(
        "Secret with the source's credentials: token for hubs, accessKeyId and secretAccessKey for buckets; for oci:// a pull Secret.",
        Change.ROLLS,
        default=None,
    )
    endpoint: EndpointUrl | None = spec_field(
        "Base URL of a mirror of the hub, or of the S3 service; the pool's, else the public one by default.", Change.ROLLS, default=None
    )
    region: Region | None = spec_field("Region of the bucket.", Change.ROLLS, default=None)
    files: list[Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^/\s][^\s]*$")]] = spec_field(
        'Globs that narrow the weights, where a source has several, such as ["*Q4_K_M.gguf"].',
        Change.ROLLS,
        default=[],
        max_length=16,
        json_schema_extra=LIST_SET,
    )
    digest: Digest | None = spec_field(
        "Digest that the fetched files must have, as status.source.digest shows it.", Change.ROLLS, default=None
    )


class Runtime(ApiModel):
    """Which engine serves the model."""

    name: RuntimeName = spec_field("Native, or VLLMAscend.", Change.ROLLS, default=RuntimeName.NATIVE)
    image: ImageRef | None = spec_field(
        "Image for VLLMAscend, of the pool's allowedImages; the only one by default.", Change.ROLLS, default=None
    )
    args: list[Annotated[str, StringConstraints(max_length=256)]] = spec_field(
        "Further arguments for VLLMAscend, --NAME or --NAME=VALUE, from an allowlist.",
        Change.ROLLS,
        default=[],
        max_length=32,
        json_schema_extra=LIST_ATOMIC,
    )


class CalibrationRef(ApiModel):
    """A ConfigMap in the model's own namespace."""

    name: DnsSubdomain


class EngineOverrides(ApiModel):
    """Engine settings. Unset fields come from the profile."""

    profile: EngineProfile = spec_field("Named set of settings.", Change.ROLLS, default=EngineProfile.BALANCED)
    dtype: Dtype | None = spec_field("Type of weights and activations.", Change.ROLLS, default=None)
    precision: PrecisionOverrides | None = spec_field("Types that differ from dtype, by role.", Change.ROLLS, default=None)
    calibration_ref: CalibrationRef | None = spec_field(
        "ConfigMap with what `npufleet-pod calibrate` wrote, under the key calibration.yaml; it goes before the profile, and fields that "
        "are set here go before it. A changed ConfigMap is read by pods that start after it.",
        Change.ROLLS,
        default=None,
    )
    max_model_length: int | None = spec_field("Longest prompt plus answer, in tokens.", Change.ROLLS, default=None, ge=16, le=10485760)
    max_num_sequences: int | None = spec_field("Most sequences in one batch.", Change.ROLLS, default=None, ge=1, le=4096)
    max_num_batched_tokens: int | None = spec_field("Most tokens in one step.", Change.ROLLS, default=None, ge=16, le=1048576)
    max_queued_requests: int | None = spec_field(
        "Requests that may wait; beyond, clients get 429 with Retry-After.", Change.ROLLS, default=None, ge=1, le=100000
    )
    block_size: BlockSize | None = spec_field("Tokens of a KV block.", Change.ROLLS, default=None)
    chunked_prefill: bool | None = spec_field(
        "Whether a prompt may be computed in parts, beside other requests' tokens. Off, only prompts longer than maxNumBatchedTokens are.",
        Change.ROLLS,
        default=None,
    )
    preemption: Preemption | None = spec_field(
        "Aggressive: newcomers first, running requests may have to wait for memory. Conservative: only what can finish is admitted.",
        Change.ROLLS,
        default=None,
    )
    scheduling_policy: SchedulingPolicy | None = spec_field(
        "LatencyOptimised computes next tokens first, ThroughputOptimised prompts first.", Change.ROLLS, default=None
    )
    starvation_steps: int | None = spec_field(
        "Steps that a request may be overtaken for; then it goes before all others.", Change.ROLLS, default=None, ge=1, le=1000000
    )
    pipeline_depth: int | None = spec_field("Steps in flight at once.", Change.ROLLS, default=None, ge=1, le=4)
    asynchronous_execution: bool | None = spec_field(
        "Whether steps are prepared and answered while others compute; off, one step follows the other.", Change.ROLLS, default=None
    )
    continuous_memory: bool | None = spec_field(
        "Whether a request's KV is laid out in adjacent memory where there is room.", Change.ROLLS, default=None
    )
    fusion_level: int | None = spec_field(
        "How much is computed by one operation: 1 pairs of operators, 2 half layers, 3 whole layers.",
        Change.ROLLS,
        default=None,
        ge=1,
        le=3,
    )
    tool_format: ToolCallFormat | None = spec_field(
        "How the model writes calls of tools: Hermes (Qwen too) or Llama; Auto goes by its chat template.", Change.ROLLS, default=None
    )
    prefix_cache: bool | None = spec_field("Whether KV of equal beginnings of prompts is kept and shared.", Change.ROLLS, default=None)
    host_cache_mi: int | None = spec_field(
        "Host memory for KV that the device has no room for, in MiB; part of resources.memory.",
        Change.ROLLS,
        default=None,
        ge=0,
        le=4194304,
    )
    disk_cache_mi: int | None = spec_field(
        "Disk for KV that host memory has no room for, in MiB; of the node's ephemeral storage. Needs hostCacheMi.",
        Change.ROLLS,
        default=None,
        ge=0,
        le=67108864,
    )


class Parallelism(ApiModel):
    """NPUs of one replica: tensor × pipeline."""

    tensor: int = spec_field("Tensor-parallel ranks.", Change.ROLLS, ge=1, le=64, default=1)
    pipeline: int = spec_field("Pipeline-parallel stages.", Change.ROLLS, ge=1, le=64, default=1)

    @property
    def npus(self) -> int:
        """NPUs of one replica."""
        return self.tensor * self.pipeline


class Resources(ApiModel):
    """CPU and memory of the engine container: requests and memory limit."""

    cpu: Quantity = spec_field("CPU request.", Change.ROLLS, default="1")
    memory: Quantity = spec_field("Memory request and limit.", Change.ROLLS, default="8Gi")


class Slo(ApiModel):
    """What clients are promised; attainment counts requests that met every target set here."""

    ttft_milliseconds: int | None = spec_field("Time to first token.", Change.LIVE, default=None, ge=1, le=3600000)
    tpot_milliseconds: int | None = spec_field("Time per output token after the first.", Change.LIVE, default=None, ge=1, le=3600000)
    attainment_percent: int = spec_field("Share of requests that shall meet every target.", Change.LIVE, default=95, ge=1, le=100)


class Scaling(ApiModel):
    """Bounds of elastic scaling."""

    min_replicas: int = spec_field("Fewest replicas.", Change.LIVE, ge=0, le=1024, default=1)
    max_replicas: int | None = spec_field("Most replicas; unset is minReplicas, at least 1.", Change.LIVE, ge=1, le=1024, default=None)
    idle_seconds: int = spec_field(
        "Time without a request after which minReplicas 0 lets the last replicas go.", Change.LIVE, ge=1, le=604800, default=300
    )


class AscendModelSpec(ApiModel):
    """What the model owner declares."""

    pool_ref: PoolRef = spec_field("Pool that the model runs in.", Change.ROLLS)
    workload_class: DnsLabel = spec_field("Class of the pool that the model claims NPUs from.", Change.ROLLS)
    model: ModelSource = spec_field("Where the weights come from.", Change.ROLLS)
    runtime: Runtime = spec_field(
        "Which engine serves the model.",
        Change.ROLLS,
        default=Runtime(),
        json_schema_extra=validations(
            cel(
                "!has(self.image) || self.name == 'VLLMAscend'",
                "runtime.image is only for VLLMAscend: remove it, or set runtime.name to VLLMAscend",
            ),
            cel(
                "!has(self.args) || size(self.args) == 0 || self.name == 'VLLMAscend'",
                "runtime.args is only for VLLMAscend: remove it and use the fields of engine, or set runtime.name to VLLMAscend",
            ),
        ),
    )
    engine: EngineOverrides = spec_field(
        "Engine settings.",
        Change.ROLLS,
        default=EngineOverrides(),
        json_schema_extra=validations(
            cel(
                "!has(self.diskCacheMi) || self.diskCacheMi == 0 || (has(self.hostCacheMi) && self.hostCacheMi > 0)",
                "engine.diskCacheMi needs engine.hostCacheMi, since KV reaches the disk through host memory: set both or neither",
            ),
            cel(
                "!has(self.precision) || !has(self.precision.kvCache) || self.precision.kvCache != 'Int8Heads' || has(self.calibrationRef)",
                "engine.precision.kvCache Int8Heads needs engine.calibrationRef, which names the heads: set it, or choose Int8 or Auto",
            ),
        ),
    )
    parallelism: Parallelism = spec_field("NPUs of one replica.", Change.ROLLS, default=Parallelism())
    resources: Resources = spec_field("CPU and memory of the engine container.", Change.ROLLS, default=Resources())
    slo: Slo | None = spec_field("What clients are promised.", Change.LIVE, default=None)
    scaling: Scaling = spec_field(
        "Bounds of elastic scaling.",
        Change.LIVE,
        default=Scaling(),
        json_schema_extra=validations(
            cel(
                "!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
                "scaling.minReplicas is above scaling.maxReplicas: lower minReplicas or raise maxReplicas",
            )
        ),
    )
    replicas: int | None = spec_field(
        "A fixed number of replicas; elastic scaling is off while it is set.", Change.LIVE, default=None, ge=0, le=1024
    )
    rollout: Rollout = spec_field(
        "RollingUpdate starts a new replica before it drains an old one, where there are spare NPUs; Recreate drains first.",
        Change.LIVE,
        default=Rollout.ROLLING_UPDATE,
    )


class MeasuredSlo(ApiModel):
    """What clients got, in a sliding window, beside what they are promised."""

    data: Annotated[str, StringConstraints(max_length=16)] = Field(default="NoData", description="NoData, Stale, Partial, Zero or Fresh.")
    window_seconds: int = Field(default=0, ge=0)
    requests: int = Field(default=0, ge=0)
    errors: int = Field(default=0, ge=0)
    attainment_percent: Percent | None = None
    ttft_p95_milliseconds: int | None = Field(default=None, ge=0)
    ttft_target_milliseconds: int | None = Field(default=None, ge=0)
    tpot_p95_milliseconds: int | None = Field(default=None, ge=0)
    tpot_target_milliseconds: int | None = Field(default=None, ge=0)


class LearnedCapacity(ApiModel):
    """What one replica was seen to do, from reports: the basis of forecasts and of what may be taken away."""

    concurrency: int = Field(default=0, ge=0, description="Most requests in flight at once with every target met; 0 is not known yet.")
    work_per_second: int = Field(
        default=0, ge=0, description="Most work per second with every target met, in generated tokens, prompts weighed; 0 is not known yet."
    )
    load_seconds: int = Field(default=0, ge=0, description="From the pod's creation until it serves; 0 is not known yet.")


class AttainedAt(ApiModel):
    """What clients got when the model had another number of replicas: what a replica more or fewer turned out to be worth."""

    replicas: int = Field(ge=1)
    percent: int = Field(ge=0, le=100, description="Requests within their targets.")
    requests_per_minute: int = Field(ge=0, description="Requests that were judged then; under another load it tells nothing.")


class ScalingStatus(ApiModel):
    """What elastic scaling sees, wants and remembers."""

    data: Annotated[str, StringConstraints(max_length=16)] = Field(default="NoData", description="NoData, Stale, Partial, Zero or Fresh.")
    wanted_replicas: int = Field(default=0, ge=0, description="Replicas that the load asks for, before the pool grants them.")
    forecast_replicas: int = Field(default=0, ge=0, description="Replicas that the forecast asks for: the floor.")
    reason: Annotated[str, StringConstraints(max_length=64)] = ""
    message: Text = ""
    last_up_time: Timestamp | None = None
    last_down_time: Timestamp | None = None
    capacity: LearnedCapacity = LearnedCapacity()
    attained: list[AttainedAt] = Field(
        default=[],
        max_length=8,
        description="Written when the number of replicas changes, latest last.",
        json_schema_extra=LIST_ATOMIC,
    )


class ResolvedEngine(ApiModel):
    """Engine settings after profile and overrides."""

    profile: EngineProfile
    device: Annotated[str, StringConstraints(max_length=8)]
    dtype: Dtype
    max_model_length: int | None = Field(default=None, ge=0, description="Unset: the model's own limit.")
    max_num_sequences: int | None = Field(default=None, ge=1, description="Unset: what the calibration says.")
    max_num_batched_tokens: int = Field(ge=1)
    block_size: int | None = Field(default=None, ge=1)
    chunked_prefill: bool | None = None
    preemption: Preemption | None = None
    scheduling_policy: SchedulingPolicy | None = None
    pipeline_depth: int | None = Field(default=None, ge=1)


class Download(ApiModel):
    """How far the slowest replica's fetch is."""

    phase: Annotated[str, StringConstraints(max_length=16)] = ""
    pods: int = Field(default=0, ge=0, description="Pods that fetch the model.")
    bytes_done: int = Field(default=0, ge=0)
    bytes_total: int = Field(default=0, ge=0)
    bytes_per_second: int = Field(default=0, ge=0)
    seconds_left: int | None = Field(default=None, ge=0)


class SourceStatus(ApiModel):
    """What was fetched for the model, as its replicas' fetch containers tell."""

    revision: Annotated[str, StringConstraints(max_length=128)] = Field(
        default="", description="What the asked revision was resolved to; every replica of the spec fetches this."
    )
    asked: Annotated[str, StringConstraints(max_length=1024)] = Field(default="", description="Address and revision that were resolved.")
    digest: Annotated[str, StringConstraints(max_length=71)] = ""
    bytes: int = Field(default=0, ge=0)
    files: int = Field(default=0, ge=0)
    fetch_seconds: int = Field(default=0, ge=0, description="Of the latest fetch over the network.")
    cached_seconds: int = Field(default=0, ge=0, description="Of the latest start from the cache.")
    download: Download | None = None


class AscendModelStatus(ApiModel):
    """What runs, what clients got, and why."""

    observed_generation: int = Field(default=0, ge=0)
    replicas: int = Field(default=0, ge=0, description="Replicas that exist and are not draining.")
    ready_replicas: int = Field(default=0, ge=0)
    desired_replicas: int = Field(default=0, ge=0, description="Replicas that the pool grants the model.")
    draining_replicas: int = Field(default=0, ge=0)
    updated_replicas: int = Field(default=0, ge=0, description="Replicas of the current revision.")
    npus: int = Field(default=0, ge=0, description="NPUs charged to the model, draining and pending included.")
    revision: Annotated[str, StringConstraints(max_length=16)] = ""
    endpoint: Text = Field(default="", description="OpenAI base URL of the gateway inside the cluster.")
    served_name: Annotated[str, StringConstraints(max_length=253)] = ""
    slo: MeasuredSlo | None = None
    engine: ResolvedEngine | None = None
    scaling: ScalingStatus | None = None
    source: SourceStatus | None = None
    last_decision: Decision | None = None
    last_scaled_time: Timestamp | None = None
    conditions: ConditionList = Field(default=[], max_length=16, json_schema_extra=list_map("type"))

    def condition(self, kind: str) -> Condition | None:
        """The condition of type `kind`, if present."""
        return next((c for c in self.conditions if c.type == kind), None)
