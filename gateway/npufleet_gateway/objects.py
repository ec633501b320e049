"""AscendModels and Pods of the API server, parsed into what routing needs. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, ValidationError
from pydantic.alias_generators import to_camel

from npufleet_api.contract import (
    DRAIN_STARTED_ANNOTATION,
    ENGINE_CONTAINER,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MODEL_NAME_ANNOTATION,
    POOL_LABEL,
    POOL_NAME_ANNOTATION,
)
from npufleet_api.model import AscendModelSpec
from npufleet_api.slo import SloTargets
from npufleet_gateway.errors import ObjectError
from npufleet_gateway.routing import Model, Replica, ReplicaState

UNCHANGED_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Pool names that are their own label: a longer or dotted name is shortened in POOL_LABEL and stands whole only in the annotation."""

ENDED_PHASES = frozenset({"Succeeded", "Failed"})


class _Object(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, frozen=True, extra="ignore")


class _Owner(_Object):
    uid: str


class _Metadata(_Object):
    name: str
    namespace: str
    uid: str
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}
    owner_references: list[_Owner] = []


class _ContainerStatus(_Object):
    name: str
    ready: bool = False


class _PodStatus(_Object):
    phase: str = ""
    pod_ip: Annotated[IPvAnyAddress | None, Field(alias="podIP")] = None
    container_statuses: list[_ContainerStatus] = []


class _Pod(_Object):
    metadata: _Metadata
    status: _PodStatus = _PodStatus()


class _PoolRef(_Object):
    name: str


class _SpecHead(_Object):
    pool_ref: _PoolRef


class _ModelHead(_Object):
    metadata: _Metadata
    spec: _SpecHead


def pod_selector(pool: str) -> str:
    """Label selector of the pool's pods; wider than the pool where its name does not fit a label (parse_pod narrows it)."""
    managed = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
    return f"{managed},{POOL_LABEL}={pool}" if UNCHANGED_LABEL.fullmatch(pool) else f"{managed},{POOL_LABEL}"


def parse_model(raw: dict[str, Any], pool: str) -> Model | None:
    """The model, or None if it is another pool's or is being deleted. Raises ObjectError."""
    try:
        head = _ModelHead.model_validate(raw)
        if head.spec.pool_ref.name != pool or head.metadata.deletion_timestamp is not None:
            return None
        spec = AscendModelSpec.model_validate(raw["spec"])
    except ValidationError as error:
        raise _object_error("AscendModel", raw, error) from error
    return Model(
        namespace=head.metadata.namespace,
        name=head.metadata.name,
        uid=head.metadata.uid,
        created=head.metadata.creation_timestamp or "",
        served_name=spec.model.served_name or head.metadata.name,
        workload_class=spec.workload_class,
        slo=SloTargets(spec.slo.ttft_milliseconds, spec.slo.tpot_milliseconds) if spec.slo else SloTargets(),
    )


def parse_pod(raw: dict[str, Any], pool: str) -> Replica | None:
    """The replica, or None if the pod is another pool's or serves no model (a gateway's). Raises ObjectError."""
    try:
        pod = _Pod.model_validate(raw)
    except ValidationError as error:
        raise _object_error("Pod", raw, error) from error
    annotations = pod.metadata.annotations
    model_name = annotations.get(MODEL_NAME_ANNOTATION)
    if model_name is None or annotations.get(POOL_NAME_ANNOTATION, pool) != pool:
        return None
    return Replica(
        namespace=pod.metadata.namespace,
        pod_name=pod.metadata.name,
        pod_uid=pod.metadata.uid,
        model_name=model_name,
        owner_uids=frozenset(owner.uid for owner in pod.metadata.owner_references),
        ip=str(pod.status.pod_ip) if pod.status.pod_ip else "",
        state=_state(pod),
    )


def _state(pod: _Pod) -> ReplicaState:
    """By the engine container's own `ready`: the pod's Ready also hangs on the monitor, whose crash must not stop traffic."""
    if pod.metadata.deletion_timestamp is not None:
        return ReplicaState.TERMINATING
    if pod.status.phase in ENDED_PHASES:
        return ReplicaState.ENDED
    if DRAIN_STARTED_ANNOTATION in pod.metadata.annotations:
        return ReplicaState.DRAINING
    engine_ready = any(status.name == ENGINE_CONTAINER and status.ready for status in pod.status.container_statuses)
    return ReplicaState.READY if engine_ready and pod.status.pod_ip else ReplicaState.STARTING


def _object_error(kind: str, raw: dict[str, Any], error: ValidationError) -> ObjectError:
    metadata = raw.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "object"
    return ObjectError(f"{kind} {metadata.get('namespace')}/{metadata.get('name')}: {where}: {first['msg']}")
