"""Conditions: their shape, types and reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from npufleet_api.schema import ApiModel, Timestamp


class ConditionStatus(StrEnum):
    """The three values of a condition."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One condition, as in metav1.Condition."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    status: ConditionStatus
    reason: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9_])?$")]
    message: Annotated[str, StringConstraints(max_length=2048)]
    last_transition_time: Timestamp
    observed_generation: int = Field(default=0, ge=0)


ConditionList = list[Condition]


class ModelCondition(StrEnum):
    """Condition types of an AscendModel, all present from the first visit."""

    ACCEPTED = "Accepted"
    CAPACITY = "CapacityAvailable"
    AVAILABLE = "Available"
    ROLLED_OUT = "RolledOut"
    ROUTED = "Routed"
    PINNED = "RevisionPinned"
    NOT_YET_EFFECTIVE = "NotYetEffective"
    READY = "Ready"


class PoolCondition(StrEnum):
    """Condition types of an InferencePool, all present from the first visit."""

    ACCEPTED = "Accepted"
    CAPACITY = "CapacityAvailable"
    GATEWAY = "GatewayAvailable"
    GUARANTEES = "GuaranteesMet"
    NODES = "NodesExclusive"
    NOT_YET_EFFECTIVE = "NotYetEffective"
    READY = "Ready"


class Reason(StrEnum):
    """Reasons of conditions, decisions and Events."""

    PENDING = "Pending"
    AS_EXPECTED = "AsExpected"
    # Accepted
    ACCEPTED = "Accepted"
    SPEC_REFUSED = "SpecRefused"
    POOL_NOT_FOUND = "PoolNotFound"
    POOL_REFUSED = "PoolRefused"
    CLASS_NOT_FOUND = "ClassNotFound"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    NOT_IMPLEMENTED = "NotImplemented"
    SERVED_NAME_TAKEN = "ServedNameTaken"
    IMAGE_NOT_ALLOWED = "ImageNotAllowed"
    RUNTIME_UNABLE = "RuntimeUnable"
    ENGINE_IMAGE_MISSING = "EngineImageMissing"
    PART_OF_UNIT = "PartOfUnit"
    SOURCE_NOT_ALLOWED = "SourceNotAllowed"
    # Capacity
    NO_CAPACITY = "NoCapacity"
    NO_NODES = "NoNodes"
    CEILING_BELOW_REPLICA = "CeilingBelowReplica"
    GUARANTEES_EXCEED_SUPPLY = "GuaranteesExceedSupply"
    GUARANTEE_FRAGMENTED = "GuaranteeFragmented"
    GUARANTEE_BELOW_REPLICA = "GuaranteeBelowReplica"
    GUARANTEE_WAITING = "GuaranteeWaiting"
    NODES_SHARED = "NodesShared"
    UNSCHEDULABLE = "Unschedulable"
    NPU_UNHEALTHY = "NpuUnhealthy"
    # Available
    IMAGE_PULL_FAILED = "ImagePullFailed"
    MODEL_UNAVAILABLE = "ModelUnavailable"
    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_UNAUTHORIZED = "SourceUnauthorized"
    SOURCE_UNAVAILABLE = "SourceUnavailable"
    SOURCE_CORRUPT = "SourceCorrupt"
    SOURCE_REFUSED = "SourceRefused"
    CACHE_FULL = "CacheFull"
    CACHE_UNAVAILABLE = "CacheUnavailable"
    FETCHING = "FetchingModel"
    DEVICE_UNAVAILABLE = "DeviceUnavailable"
    OUT_OF_MEMORY = "OutOfMemory"
    ENGINE_FAILED = "EngineFailed"
    CONFIG_ERROR = "ContainerConfigError"
    LOADING = "Loading"
    READY = "Ready"
    DEGRADED = "Degraded"
    SCALED_TO_ZERO = "ScaledToZero"
    CREATE_REFUSED = "CreateRefused"
    # RolledOut
    ROLLING_OUT = "RollingOut"
    PRELOADING = "Preloading"
    WAITING_FOR_SPARE = "WaitingForSpareNPUs"
    ROLLED_OUT = "RolledOut"
    # Routed
    ROUTED = "Routed"
    # RevisionPinned
    PINNED_REVISION = "ContentPinned"
    FLOATING = "FloatingRevision"
    # NotYetEffective
    FIELDS_NOT_YET_EFFECTIVE = "FieldsNotYetEffective"
    ALL_EFFECTIVE = "AllFieldsEffective"
    # Gateway
    GATEWAY_READY = "GatewayReady"
    GATEWAY_UNAVAILABLE = "GatewayUnavailable"
    GATEWAY_EXTERNAL = "GatewayExternal"
    ROUTE_KIND_MISSING = "RouteKindMissing"
    # Decisions
    ADVISORY = "Advisory"
    STEADY = "Steady"
    PINNED = "Pinned"
    ATTAINMENT_LOW = "AttainmentLow"
    PREDICTED_MISS = "PredictedMiss"
    FORECAST_DEMAND = "ForecastDemand"
    WOKEN_BY_DEMAND = "WokenByDemand"
    LOAD_FELL = "LoadFell"
    IDLE = "Idle"
    OUTSIDE_BOUNDS = "OutsideBounds"
    SCALE_DOWN_UNSAFE = "ScaleDownUnsafe"
    SLO_UNATTAINABLE = "SloUnattainable"
    HOLD_PENDING = "HoldPending"
    HOLD_NO_DATA = "HoldNoData"
    HOLD_COOLDOWN = "HoldCooldown"
    RECLAIMED_FOR_GUARANTEE = "ReclaimedForGuarantee"
    WORTH_MORE_ELSEWHERE = "WorthMoreElsewhere"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    REPLACED_FAILED = "ReplacedFailed"
    ROLLOUT_SURGE = "RolloutSurge"
    ROLLOUT_REPLACE = "RolloutReplace"
    CLAMPED_BY_CAPACITY = "ClampedByCapacity"
    CLAMPED_BY_CEILING = "ClampedByCeiling"
    CLAMPED_BY_MAXIMUM = "ClampedByMaximum"
    DRAIN_STARTED = "DrainStarted"
    DRAIN_COMPLETED = "DrainCompleted"
    DRAIN_DEADLINE = "DrainDeadlineReached"
    DRAIN_CANCELLED = "DrainCancelled"
    NODE_MAINTENANCE = "NodeMaintenance"
    REMOVED_UNSERVED = "RemovedUnserved"
