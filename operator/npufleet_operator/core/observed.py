"""What the operator sees of the cluster, as frozen data. Built at the border, read by the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from npufleet_api.contract import EngineState
from npufleet_api.fetching import FetchOutcome, FetchProgress
from npufleet_api.model import AscendModelSpec, AscendModelStatus
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus, NpuSelection
from npufleet_api.report import DataState, GatewayReport

EPOCH = datetime.fromtimestamp(0, UTC)
ModelKey = tuple[str, str]
"""Namespace and name of an AscendModel."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """An InferencePool. `spec` is None when it could not be parsed; `spec_error` then names field, value and remedy."""

    name: str
    uid: str
    generation: int
    spec: InferencePoolSpec | None
    spec_error: str
    status: InferencePoolStatus
    created: datetime = EPOCH


@dataclass(frozen=True, slots=True)
class ModelView:
    """An AscendModel. `pool_name` is known even where the rest of the spec could not be parsed."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: datetime
    pool_name: str
    spec: AscendModelSpec | None
    spec_error: str
    status: AscendModelStatus

    @property
    def key(self) -> ModelKey:
        """Namespace and name."""
        return (self.namespace, self.name)

    @property
    def served_name(self) -> str:
        """Name that clients send; the resource's name by default."""
        return (self.spec.model.served_name if self.spec else None) or self.name


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod that holds NPUs or that npufleet owns."""

    namespace: str
    name: str
    uid: str
    created: datetime
    labels: Mapping[str, str]
    owner_uid: str
    owner_name: str
    """AscendModel that controls the pod; empty for foreign pods."""
    node: str
    phase: str
    requests: Mapping[str, int]
    """Extended resources that the pod asks for, by name."""
    ip: str = ""
    terminating: bool = False
    engine_ready: bool = False
    engine_started: bool = False
    """The engine container runs, ready or not."""
    engine_restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    terminated_message: str = ""
    """Last words of the engine container, from its termination message."""
    terminated_reason: str = ""
    """The kubelet's word for how the engine container ended, such as OOMKilled."""
    exit_code: int | None = None
    fetch: FetchOutcome | None = None
    """How the fetch container ended, the last time that it did."""
    fetching: bool = False
    """The fetch container runs."""
    source_asked: str = ""
    """What the pod's model was asked for, as its spec was when the pod was made."""
    scheduling_message: str = ""
    drain_started: datetime | None = None
    drain_reason: str = ""
    ready_since: datetime | None = None
    """When the pod's containers became ready, for the last time; None while they are not."""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)

    @property
    def host(self) -> str:
        """The pod's address as it stands in a URL."""
        return f"[{self.ip}]" if ":" in self.ip else self.ip

    @property
    def finished(self) -> bool:
        """The pod has ended and holds no NPU any more."""
        return self.phase in ("Succeeded", "Failed")


class JobState(StrEnum):
    """Where a job is."""

    ABSENT = "Absent"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, with extended resources as whole numbers by name."""

    name: str
    labels: Mapping[str, str]
    ready: bool
    schedulable: bool
    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineProbe:
    """What the admin port of a draining replica answered; None where it could not be reached."""

    state: EngineState | None
    running: int = 0
    waiting: int = 0
    left_seconds: float | None = None
    """Of its drain, by the engine's own clock."""


@dataclass(frozen=True, slots=True)
class TrafficView:
    """What the pool's gateways report, and how far it can be trusted."""

    data: DataState = DataState.NO_DATA
    reports: tuple[GatewayReport, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayView:
    """State of a pool's gateway Deployment."""

    exists: bool = False
    ready_replicas: int = 0
    external: bool = False
    """The site's inference gateway serves instead."""
    route_kind_missing: bool = False
    """An HTTPRoute is asked for that the cluster cannot have."""


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """What the chart tells the operator."""

    namespace: str
    engine_image: str
    control_image: str
    image_pull_policy: str = "IfNotPresent"
    gateway_service_account: str = "npufleet-gateway"
    gateway_service_type: str = "ClusterIP"
    gateway_resources: Mapping[str, Any] = field(default_factory=dict)
    image_pull_secrets: tuple[str, ...] = ()
    npu_exporter_url: str = ""
    """Where monitors read the node's NPUs; $(HOST_IP) in it stands for the node's address. Empty: they do not."""
    optional_kinds: frozenset[str] = frozenset()
    """Kinds that the cluster has although it need not."""


@dataclass(frozen=True, slots=True)
class RivalPool:
    """Another pool: a node that both select belongs to the older one, then to the first by name."""

    name: str
    created: datetime
    npus: NpuSelection


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that one plan of one pool is made from."""

    pool_name: str
    pool: PoolView | None
    models: tuple[ModelView, ...]
    pods: tuple[PodView, ...]
    """Pods of npufleet in any pool, and foreign pods that ask for the pool's resource."""
    nodes: tuple[NodeView, ...]
    namespaces: Mapping[str, Mapping[str, str]]
    """Labels of each namespace."""
    probes: Mapping[str, EngineProbe]
    """Answers of draining replicas' admin ports, by pod UID."""
    traffic: TrafficView
    gateway: GatewayView
    config: OperatorConfig
    fetches: Mapping[str, FetchProgress] = field(default_factory=dict)
    """How far fetch containers are, by pod UID."""
    jobs: Mapping[tuple[str, str], JobState] = field(default_factory=dict)
    """Preload jobs of the pool's models, by namespace and name."""
    refused: Mapping[ModelKey, str] = field(default_factory=dict)
    """Last words of the API server where it refused an object of the model."""
    rivals: tuple[RivalPool, ...] = ()
    """Other pools whose specs can be used."""
