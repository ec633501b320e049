"""Objects of the API server, parsed once at the border into the planner's views."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from npufleet_api import API_VERSION, MODEL_KIND
from npufleet_api.contract import DRAIN_REASON_ANNOTATION, DRAIN_STARTED_ANNOTATION, ENGINE_CONTAINER
from npufleet_api.fetching import FETCH_CONTAINER, SOURCE_ASKED_ANNOTATION, FetchOutcome
from npufleet_api.model import AscendModelSpec, AscendModelStatus
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus
from npufleet_operator.core.acceptance import contradiction
from npufleet_operator.core.conditions import parse_timestamp
from npufleet_operator.core.observed import EPOCH, JobState, ModelView, NodeView, PodView, PoolView

Json = Mapping[str, Any]
M = TypeVar("M", bound=BaseModel)
MAX_OUTCOME = 4096


def pool_view(raw: Json, known: PoolView | None = None) -> PoolView:
    """An InferencePool; a spec that does not parse, or that contradicts itself, becomes `spec_error`. `known`: what it was before; a spec
    of the same generation is the same, and keeps its parsed object."""
    metadata = raw["metadata"]
    if known is not None and _same_generation(known, metadata):
        spec, error = known.spec, known.spec_error
    else:
        spec, error = _spec(InferencePoolSpec, raw)
        if spec is not None and (error := contradiction(spec)):
            spec = None
    return PoolView(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        spec=spec,
        spec_error=error,
        status=_status(InferencePoolStatus, raw),
        created=_time(metadata.get("creationTimestamp")) or EPOCH,
    )


def model_view(raw: Json, known: ModelView | None = None) -> ModelView:
    """An AscendModel; a spec that does not parse becomes `spec_error`. `known`: as for a pool."""
    metadata = raw["metadata"]
    if known is not None and _same_generation(known, metadata):
        spec, error = known.spec, known.spec_error
    else:
        spec, error = _spec(AscendModelSpec, raw)
    reference = (raw.get("spec") or {}).get("poolRef") or {}
    return ModelView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        created=_time(metadata.get("creationTimestamp")) or EPOCH,
        pool_name=str(reference.get("name", "")),
        spec=spec,
        spec_error=error,
        status=_status(AscendModelStatus, raw),
    )


def pod_view(raw: Json) -> PodView:
    """A pod, reduced to what planning needs."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    annotations = metadata.get("annotations") or {}
    owner: Json = next(
        (o for o in metadata.get("ownerReferences") or [] if o.get("kind") == MODEL_KIND and o.get("apiVersion") == API_VERSION), {}
    )
    engine: Json = next((c for c in status.get("containerStatuses") or [] if c.get("name") == ENGINE_CONTAINER), {})
    state = engine.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or (engine.get("lastState") or {}).get("terminated") or {}
    unscheduled: Json = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled" and c.get("status") == "False"), {}
    )
    contained: Json = next(
        (c for c in status.get("conditions") or [] if c.get("type") == "ContainersReady" and c.get("status") == "True"), {}
    )
    initial: Json = next((c for c in status.get("initContainerStatuses") or [] if (c.get("state") or {}).get("waiting")), {})
    if not waiting or waiting.get("reason") in ("PodInitializing", "ContainerCreating"):
        waiting = (initial.get("state") or {}).get("waiting") or waiting
    fetch: Json = next((c for c in status.get("initContainerStatuses") or [] if c.get("name") == FETCH_CONTAINER), {})
    fetch_state = fetch.get("state") or {}
    fetch_ended = fetch_state.get("terminated") or (fetch.get("lastState") or {}).get("terminated") or {}
    return PodView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        created=_time(metadata.get("creationTimestamp")) or EPOCH,
        labels=metadata.get("labels") or {},
        owner_uid=owner.get("uid", ""),
        owner_name=owner.get("name", ""),
        node=spec.get("nodeName") or "",
        phase=status.get("phase", "Pending"),
        requests=pod_requests(spec),
        ip=status.get("podIP") or "",
        terminating=bool(metadata.get("deletionTimestamp")),
        engine_ready=bool(engine.get("ready")),
        engine_started="running" in state,
        engine_restarts=int(engine.get("restartCount", 0)),
        waiting_reason=str(waiting.get("reason", "")),
        waiting_message=str(waiting.get("message", "")),
        terminated_message=str(ended.get("message", "")),
        terminated_reason=str(ended.get("reason", "")),
        exit_code=ended.get("exitCode"),
        fetch=_outcome(fetch_ended),
        fetching="running" in fetch_state,
        source_asked=str(annotations.get(SOURCE_ASKED_ANNOTATION, "")),
        scheduling_message=str(unscheduled.get("message", "")),
        drain_started=_time(annotations.get(DRAIN_STARTED_ANNOTATION)),
        drain_reason=str(annotations.get(DRAIN_REASON_ANNOTATION, "")),
        ready_since=_time(contained.get("lastTransitionTime")),
    )


def _outcome(ended: Json) -> FetchOutcome | None:
    """What the fetch container says of itself; one that was killed says nothing."""
    if not ended:
        return None
    try:
        return FetchOutcome.model_validate_json(str(ended.get("message", ""))[:MAX_OUTCOME])
    except ValidationError:
        return None


def pod_requests(spec: Json) -> dict[str, int]:
    """Extended resources of a pod: containers added up, or the largest init container, whichever is more; sidecars are added."""
    total: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("containers") or []:
        _add(total, container)
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":
            _add(total, container)
            continue
        own: dict[str, int] = {}
        _add(own, container)
        peak = {name: max(peak.get(name, 0), own.get(name, 0) + total.get(name, 0)) for name in {*peak, *own}}
    return {name: max(total.get(name, 0), peak.get(name, 0)) for name in sorted({*total, *peak})}


def job_state(raw: Json) -> JobState:
    """Where a job is."""
    true = {c.get("type") for c in (raw.get("status") or {}).get("conditions") or [] if c.get("status") == "True"}
    if "Complete" in true:
        return JobState.COMPLETE
    return JobState.FAILED if "Failed" in true else JobState.RUNNING


def node_view(raw: Json) -> NodeView:
    """A node with its extended resources."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or [])
    return NodeView(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        ready=ready,
        schedulable=not spec.get("unschedulable", False),
        capacity=_extended(status.get("capacity") or {}),
        allocatable=_extended(status.get("allocatable") or {}),
    )


def _add(total: dict[str, int], container: Json) -> None:
    resources = container.get("resources") or {}
    for name, count in _extended({**(resources.get("limits") or {}), **(resources.get("requests") or {})}).items():
        total[name] = total.get(name, 0) + count


def _extended(resources: Json) -> dict[str, int]:
    """Whole numbers of extended resources: those with a domain in their name. What is no whole number is left out."""
    return {name: int(value) for name, value in resources.items() if "/" in name and str(value).isdigit()}


def _spec(kind: type[M], raw: Json) -> tuple[M | None, str]:
    try:
        return kind.model_validate(raw.get("spec") or {}), ""
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(("spec", *(str(part) for part in first["loc"])))
        return None, f"{where}: {first['msg']} (found {str(first['input'])[:100]!r})"


def _same_generation(known: PoolView | ModelView, metadata: Json) -> bool:
    """The API server counts a generation up with every change of a spec."""
    return known.generation > 0 and (known.uid, known.generation) == (metadata["uid"], metadata.get("generation"))


def _status(kind: type[M], raw: Json) -> M:
    """A status that someone else wrote and that does not parse counts as none: it is written anew."""
    try:
        return kind.model_validate(raw.get("status") or {})
    except ValidationError:
        return kind()


def _time(text: object) -> datetime | None:
    return parse_timestamp(text) if isinstance(text, str) else None
