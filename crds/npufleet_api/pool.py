"""`InferencePool`: which NPUs, which workload classes, and what each class is guaranteed. Owned by the platform."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from npufleet_api.conditions import Condition, ConditionList
from npufleet_api.schema import (
    LIST_ATOMIC,
    LIST_SET,
    QUALIFIED_NAME,
    ApiModel,
    Change,
    DnsLabel,
    DnsSubdomain,
    EndpointUrl,
    ImageRef,
    LabelKey,
    Labels,
    LabelValue,
    Percent,
    Region,
    Text,
    Timestamp,
    cel,
    list_map,
    spec_field,
    validations,
)


class PoolMode(StrEnum):
    """Whether the operator acts on what it decides."""

    ACTIVE = "Active"
    ADVISORY = "Advisory"


class Device(StrEnum):
    """What the engines of a pool compute on."""

    NPU = "NPU"
    CPU = "CPU"


class Reclaim(StrEnum):
    """What may be taken back for a class that asks for its guarantee."""

    BORROWED_ONLY = "BorrowedOnly"
    NEVER = "Never"


class PreloadMode(StrEnum):
    """When models are brought into caches ahead."""

    OFF = "Off"
    ROLLOUT = "Rollout"


class Borrowing(StrEnum):
    """Who borrows what no guarantee needs."""

    BY_ATTAINMENT = "ByAttainment"
    BY_PRIORITY = "ByPriority"


class NpuSelection(ApiModel):
    """Which NPUs belong to the pool."""

    resource_name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=QUALIFIED_NAME)] = spec_field(
        "Extended resource that the site's device plugin advertises, for example huawei.com/Ascend910.", Change.ROLLS
    )
    node_selector: Labels = spec_field("Labels of the nodes whose NPUs belong to the pool.", Change.ROLLS, default={})
    unit: int = spec_field(
        "Smallest allocatable group of NPUs; 2 on A3/910C, where a module has two dies.",
        Change.ROLLS,
        ge=1,
        le=16,
        default=1,
    )


class SelectorRequirement(ApiModel):
    """One expression of a label selector."""

    key: LabelKey
    operator: Annotated[str, Field(pattern="^(In|NotIn|Exists|DoesNotExist)$", max_length=16)]
    values: list[LabelValue] = Field(default=[], max_length=64, json_schema_extra=LIST_SET)


class NamespaceSelector(ApiModel):
    """A label selector over namespaces; empty selects every namespace."""

    match_labels: Labels = Field(default={}, description="Labels that a namespace must carry.")
    match_expressions: list[SelectorRequirement] = Field(default=[], max_length=16, json_schema_extra=LIST_ATOMIC)


class WorkloadClass(ApiModel):
    """What one class of work is promised, in percent of the pool's nominal NPUs; both bounds round down to whole NPUs."""

    name: DnsLabel = spec_field("Name that AscendModels give as workloadClass.", Change.LIVE)
    priority: int = spec_field("Larger is served first; equal priorities are ordered by name.", Change.LIVE, ge=0, le=1000, default=0)
    min_percent: Percent = spec_field("Guaranteed share; lent to others while idle.", Change.LIVE, default=0)
    max_percent: Percent = spec_field("Ceiling that borrowing cannot pass.", Change.LIVE, default=100)
    claimable: bool = spec_field(
        "Whether any request may claim the class by the header x-npufleet-class; API keys list the classes that theirs may claim.",
        Change.LIVE,
        default=False,
    )
    namespace_selector: NamespaceSelector = spec_field(
        "Namespaces whose models may claim the class; absent or {} is every namespace.",
        Change.LIVE,
        default=NamespaceSelector(),
    )


class Rebalancing(ApiModel):
    """How fast the pool moves NPUs between models."""

    interval_seconds: int = spec_field("Longest time between two decisions.", Change.LIVE, ge=1, le=3600, default=15)
    cooldown_seconds: int = spec_field("Quiet time of a model after it was scaled.", Change.LIVE, ge=0, le=86400, default=120)
    drain_seconds: int = spec_field(
        "Time that a draining replica has to finish what it runs; its NPUs stay charged until its pod is gone.", Change.LIVE,
        ge=1, le=3600, default=120,
    )  # fmt: skip
    reclaim: Reclaim = spec_field("What may be taken back for a guarantee.", Change.LIVE, default=Reclaim.BORROWED_ONLY)
    borrowing: Borrowing = spec_field(
        "Who borrows what no guarantee needs: those whose clients gain most by it, or those of the highest priority, first come.",
        Change.LIVE, default=Borrowing.BY_ATTAINMENT,
    )  # fmt: skip


class PodImages(ApiModel):
    """Images of the inference pods; the chart's values are the defaults."""

    engine: ImageRef | None = spec_field("Image of the engine container.", Change.ROLLS, default=None)
    monitor: ImageRef | None = spec_field("Image of the monitoring sidecar.", Change.ROLLS, default=None)


class Toleration(ApiModel):
    """A pod toleration, as in the core API."""

    key: LabelKey | None = None
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$", max_length=8)] = "Equal"
    value: LabelValue | None = None
    effect: Annotated[str, Field(pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$", max_length=16)] | None = None
    toleration_seconds: int | None = Field(default=None, ge=0, le=86400)


class EnvVar(ApiModel):
    """A plain environment variable of the engine container."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Text = ""


class DriverVolume(ApiModel):
    """A read-only host path that the engine needs where no container runtime injects the driver."""

    name: DnsLabel
    host_path: Annotated[str, StringConstraints(min_length=2, max_length=512, pattern=r"^/[^:]+$")]
    mount_path: Annotated[str, StringConstraints(min_length=2, max_length=512, pattern=r"^/[^:]+$")]


class PodTemplate(ApiModel):
    """What every inference pod of the pool gets. The platform's: tenants cannot set any of it."""

    device: Device = spec_field("NPU, or CPU for development clusters.", Change.ROLLS, default=Device.NPU)
    images: PodImages = spec_field("Images of engine and monitor.", Change.ROLLS, default=PodImages())
    allowed_images: list[ImageRef] = spec_field(
        "Images that models with runtime VLLMAscend may choose.",
        Change.LIVE,
        default=[],
        max_length=32,
        json_schema_extra=LIST_SET,
    )
    runtime_class_name: DnsSubdomain | None = spec_field("RuntimeClass, for example ascend.", Change.ROLLS, default=None)
    tolerations: list[Toleration] = spec_field(
        "Tolerations of the pods.", Change.ROLLS, default=[], max_length=16, json_schema_extra=LIST_ATOMIC
    )
    node_selector: Labels = spec_field("Further node labels, besides npus.nodeSelector.", Change.ROLLS, default={})
    scheduler_name: DnsSubdomain | None = spec_field("Scheduler of the pods.", Change.ROLLS, default=None)
    priority_class_name: DnsSubdomain | None = spec_field("PriorityClass of the pods.", Change.ROLLS, default=None)
    supplemental_groups: list[Annotated[int, Field(ge=1, le=2147483647)]] = spec_field(
        "Groups that own the device nodes, often 1000 (HwHiAiUser).",
        Change.ROLLS,
        default=[],
        max_length=16,
        json_schema_extra=LIST_SET,
    )
    shm_size_mi: int = spec_field("Size of /dev/shm in MiB.", Change.ROLLS, ge=16, le=1048576, default=1024)
    env: list[EnvVar] = spec_field(
        "Environment of the engine container.",
        Change.ROLLS,
        default=[],
        max_length=64,
        json_schema_extra=list_map("name"),
    )
    driver_volumes: list[DriverVolume] = spec_field(
        "Host paths of the driver, mounted read-only.",
        Change.ROLLS,
        default=[],
        max_length=16,
        json_schema_extra=list_map("name"),
    )
    image_pull_secrets: list[DnsSubdomain] = spec_field(
        "Names of pull Secrets in the model's namespace.",
        Change.ROLLS,
        default=[],
        max_length=8,
        json_schema_extra=LIST_SET,
    )


class EndpointScheme(StrEnum):
    """Kinds of sources whose endpoint a pool can name."""

    HUGGING_FACE = "hf"
    MODEL_SCOPE = "ms"
    S3 = "s3"
    OBS = "obs"


class SourceEndpoint(ApiModel):
    """Where sources of one kind are reached: a mirror of a hub, or a site's object store."""

    scheme: EndpointScheme
    url: EndpointUrl
    region: Region | None = None


class ModelCache(ApiModel):
    """Where fetched models are kept: a directory of each node, or a shared volume. Without one every pod fetches anew."""

    host_path: Annotated[str, StringConstraints(min_length=2, max_length=512, pattern=r"^/[^:]+$")] | None = spec_field(
        "Directory of the nodes, owned by user 65532.", Change.ROLLS, default=None
    )
    claim_name: DnsSubdomain | None = spec_field("ReadWriteMany claim of that name in each model's namespace.", Change.ROLLS, default=None)
    size_limit_gi: int | None = spec_field(
        "Most that the cache may hold in GiB; beyond, what no model uses goes. Unset: the disk's own limit.",
        Change.ROLLS,
        ge=1,
        le=1048576,
        default=None,
    )


class Preload(ApiModel):
    """Models brought into nodes' caches before a replica needs them."""

    mode: PreloadMode = spec_field(
        "Rollout: a new revision is in the caches before replicas are replaced. Off: replicas fetch for themselves.",
        Change.LIVE,
        default=PreloadMode.ROLLOUT,
    )
    priority_class_name: DnsSubdomain | None = spec_field("PriorityClass of the jobs, a low one.", Change.LIVE, default=None)
    timeout_seconds: int = spec_field("After so long a rollout goes on without the job.", Change.LIVE, ge=60, le=604800, default=7200)


class ModelPolicy(ApiModel):
    """What models of the pool may be made of, and where they are kept."""

    allowed_sources: list[Annotated[str, StringConstraints(min_length=6, max_length=512, pattern=r"^(hf|ms|s3|obs|oci|pvc)://[^\s]+$")]] = (
        spec_field(
            "Addresses that models may use, * for any text, such as hf://Qwen/*; empty allows all.",
            Change.LIVE,
            default=[],
            max_length=64,
            json_schema_extra=LIST_SET,
        )
    )
    require_pinned: bool = spec_field(
        "Whether models must name a commit, an image's digest, or a digest of the content.", Change.LIVE, default=False
    )
    allow_pickle: bool = spec_field(
        "Whether weights may be pickles where there are no safetensors; reading one can run code.", Change.ROLLS, default=False
    )
    endpoints: list[SourceEndpoint] = spec_field(
        "Mirrors and object stores, one for each kind.", Change.ROLLS, default=[], max_length=4, json_schema_extra=list_map("scheme")
    )
    cache: ModelCache | None = spec_field(
        "Where fetched models are kept.",
        Change.ROLLS,
        default=None,
        json_schema_extra=validations(
            cel(
                "has(self.hostPath) != has(self.claimName)",
                "models.cache needs either hostPath or claimName: set one of them",
            )
        ),
    )
    preload: Preload = spec_field("What is fetched ahead.", Change.LIVE, default=Preload())

    def endpoint(self, scheme: str) -> SourceEndpoint | None:
        """The endpoint of sources of this kind, if the pool names one."""
        return next((e for e in self.endpoints if e.scheme == scheme), None)


class GatewayMode(StrEnum):
    """Whose gateway serves the pool's models."""

    OWN = "Own"
    EXTERNAL = "External"


class RouteParent(ApiModel):
    """A Gateway of the Gateway API to which the pool's HTTPRoute attaches."""

    name: DnsSubdomain
    namespace: DnsLabel | None = Field(default=None, description="Namespace of the Gateway; the operator's where it is absent.")
    section_name: DnsSubdomain | None = Field(
        default=None, description="Listener of the Gateway; all that admit the route where it is absent."
    )


class GatewayRoute(ApiModel):
    """An HTTPRoute that leads /v1/ of a Gateway to the pool's gateway."""

    parent_refs: list[RouteParent] = spec_field(
        "Gateways to which the route attaches.", Change.LIVE, min_length=1, max_length=8, json_schema_extra=LIST_ATOMIC
    )
    hostnames: list[DnsSubdomain] = spec_field(
        "Host names that the route serves; all of the Gateway's where it is empty.",
        Change.LIVE,
        default=[],
        max_length=16,
        json_schema_extra=LIST_SET,
    )


class Hedging(ApiModel):
    """When a stream that has not begun is asked of a second replica too."""

    budget_percent: int = spec_field("Most of a model's streams that may be copied.", Change.LIVE, ge=1, le=50, default=5)
    delay_percentile: int = spec_field(
        "A stream is late after this percentile of the times that the model's replicas took to a stream's first bytes.", Change.LIVE,
        ge=50, le=99, default=95,
    )  # fmt: skip


class GatewayTemplate(ApiModel):
    """The pool's gateway."""

    mode: GatewayMode = spec_field(
        "Own, or External where an inference gateway of the site serves the models: then npufleet starts none, and holds what it scales.",
        Change.LIVE,
        default=GatewayMode.OWN,
    )
    inference_gateway_namespaces: list[DnsLabel] = spec_field(
        "Namespaces of an inference gateway and its endpoint picker, which may then reach the engines.",
        Change.LIVE,
        default=[],
        max_length=8,
        json_schema_extra=LIST_SET,
    )
    http_route: GatewayRoute | None = spec_field(
        "HTTPRoute to the pool's own gateway; needs the Gateway API's CRDs.", Change.LIVE, default=None
    )

    replicas: int = spec_field("Gateway replicas.", Change.LIVE, ge=1, le=64, default=1)
    api_keys_secret_name: DnsSubdomain | None = spec_field(
        "Secret in the operator's namespace that holds API keys, one per entry; without it the gateway asks for none.",
        Change.LIVE,
        default=None,
    )
    tls_secret_name: DnsSubdomain | None = spec_field(
        "Secret of type kubernetes.io/tls in the operator's namespace; with it the gateway also serves TLS, on port 8443.",
        Change.LIVE,
        default=None,
    )
    tls_only: bool = spec_field(
        "Serve clients with TLS alone: the plain port then answers probes, metrics and the report, and the Service leaves it out.",
        Change.LIVE,
        default=False,
    )
    hedging: Hedging | None = spec_field(
        "Ask a second replica for streams that are late; none is where it is absent.", Change.LIVE, default=None
    )
    queue_seconds: int = spec_field("Longest wait of a request for a slot at its model's replicas.", Change.LIVE, ge=1, le=3600, default=30)
    hold_seconds: int = spec_field(
        "Longest wait of a request for a model's first replica; 0 refuses at once.", Change.LIVE, ge=0, le=3600, default=300
    )
    replica_concurrency: int = spec_field(
        "Requests that a replica is taken to run at once until its monitor reports better.", Change.LIVE, ge=1, le=65536, default=256
    )


class AlertThresholds(ApiModel):
    """When the monitors raise an alert, in percent."""

    memory_percent: Percent = spec_field("Device memory in use.", Change.LIVE, default=85)
    compute_percent: Percent = spec_field("Compute in use.", Change.LIVE, default=90)
    pipeline_stall_percent: Percent = spec_field("Time that compute waited for its inputs.", Change.LIVE, default=15)
    timeout_percent: Percent = spec_field("Requests that ran into a timeout.", Change.LIVE, default=5)


class InferencePoolSpec(ApiModel):
    """What the platform engineer declares."""

    mode: PoolMode = spec_field(
        "Active acts on decisions; Advisory decides and publishes, and changes nothing.",
        Change.LIVE,
        default=PoolMode.ACTIVE,
    )
    npus: NpuSelection = spec_field("Which NPUs belong to the pool.", Change.ROLLS)
    classes: list[WorkloadClass] = Field(
        description="Workload classes and what each is promised.",
        min_length=1,
        max_length=16,
        json_schema_extra={
            **list_map("name"),
            **validations(
                cel(
                    "self.all(c, (has(c.minPercent) ? c.minPercent : 0) <= (has(c.maxPercent) ? c.maxPercent : 100))",
                    "minPercent is above maxPercent in a class: lower minPercent or raise maxPercent",
                ),
                cel(
                    "self.map(c, has(c.minPercent) ? c.minPercent : 0).sum() <= 100",
                    "the classes' minPercent add up to more than 100: lower some, a pool cannot guarantee more than it has",
                ),
            ),
        },
    )
    rebalancing: Rebalancing = spec_field("How fast the pool moves NPUs.", Change.LIVE, default=Rebalancing())
    pod_template: PodTemplate = spec_field("What every inference pod gets.", Change.ROLLS, default=PodTemplate())
    models: ModelPolicy = spec_field("What models may be made of, and where they are kept.", Change.ROLLS, default=ModelPolicy())
    gateway: GatewayTemplate = spec_field(
        "The pool's gateway.",
        Change.LIVE,
        default=GatewayTemplate(),
        json_schema_extra=validations(
            cel(
                "!has(self.tlsOnly) || !self.tlsOnly || has(self.tlsSecretName)",
                "gateway.tlsOnly needs a certificate: set gateway.tlsSecretName, or remove tlsOnly",
            )
        ),
    )
    alerts: AlertThresholds = spec_field("When the monitors raise an alert.", Change.LIVE, default=AlertThresholds())

    def workload_class(self, name: str) -> WorkloadClass | None:
        """The class called `name`, if the pool has it."""
        return next((c for c in self.classes if c.name == name), None)


class ClassLedger(ApiModel):
    """One class in the ledger, in NPUs."""

    name: DnsLabel
    guaranteed: int = Field(ge=0, description="Guaranteed NPUs; fewer than minPercent says where failures leave too few for all.")
    ceiling: int = Field(ge=0, description="Most NPUs that the class may hold.")
    used: int = Field(ge=0, description="NPUs charged to the class, draining and pending included.")
    borrowed: int = Field(ge=0, description="NPUs used above the guarantee.")
    lent: int = Field(default=0, ge=0, description="NPUs of the idle guarantee that other classes use.")
    wanted: int = Field(default=0, ge=0, description="NPUs of all replicas that the class's models want, granted or not.")
    draining: int = Field(ge=0, description="NPUs of replicas that drain or terminate.")
    pending: int = Field(ge=0, description="NPUs of replicas that are not ready yet.")


class Decision(ApiModel):
    """One decision and its reason."""

    time: Timestamp
    model: Text = Field(description="namespace/name of the model.")
    reason: Annotated[str, StringConstraints(max_length=64)]
    message: Text


class InferencePoolStatus(ApiModel):
    """The ledger, conditions and the last decisions."""

    observed_generation: int = Field(default=0, ge=0)
    nominal: int = Field(default=0, ge=0, description="NPUs of the matching nodes, healthy or not.")
    supply: int = Field(default=0, ge=0, description="Allocatable NPUs of ready, schedulable nodes, less those that foreign pods hold.")
    foreign: int = Field(default=0, ge=0, description="NPUs held by pods that are not npufleet's.")
    allocated: int = Field(default=0, ge=0, description="NPUs charged to models, draining and pending included.")
    draining: int = Field(default=0, ge=0, description="NPUs of replicas that drain or terminate.")
    models: int = Field(default=0, ge=0, description="Models that refer to the pool.")
    endpoint: Text = Field(default="", description="Address of the gateway inside the cluster.")
    classes: list[ClassLedger] = Field(default=[], max_length=16, json_schema_extra=list_map("name"))
    decisions: list[Decision] = Field(default=[], max_length=20, json_schema_extra=LIST_ATOMIC)
    conditions: ConditionList = Field(default=[], max_length=16, json_schema_extra=list_map("type"))

    def condition(self, kind: str) -> Condition | None:
        """The condition of type `kind`, if present."""
        return next((c for c in self.conditions if c.type == kind), None)
