"""What operator, gateway, monitor and engine agree on: names, labels, ports, paths, environment, and the admin protocol."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

ENGINE_PORT = 8000
MONITOR_PORT = 8001
ADMIN_PORT = 8002
GATEWAY_PORT = 8080
GATEWAY_TLS_PORT = 8443
OPERATOR_PORT = 9090
NPU_EXPORTER_PORT = 8082

ENGINE_CONTAINER = "engine"
MONITOR_CONTAINER = "monitor"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY = "npufleet-operator"
FIELD_MANAGER = "npufleet-operator"

MODEL_LABEL = "npufleet.dev/model"
"""Slug of the AscendModel's name; labels hold 63 characters, names 253."""
POOL_LABEL = "npufleet.dev/pool"
CLASS_LABEL = "npufleet.dev/workload-class"
REVISION_LABEL = "npufleet.dev/revision"
SLOT_LABEL = "npufleet.dev/slot"
MODEL_NAME_ANNOTATION = "npufleet.dev/model-name"
POOL_NAME_ANNOTATION = "npufleet.dev/pool-name"
DRAIN_STARTED_ANNOTATION = "npufleet.dev/drain-started"
"""RFC 3339 time at which the operator chose the pod to drain. Its presence takes the pod out of routing at once."""
DRAIN_REASON_ANNOTATION = "npufleet.dev/drain-reason"

SETTINGS_DIR = "/etc/npufleet"
ENGINE_SETTINGS_FILE = "engine.yaml"
CALIBRATION_DIR = "/etc/npufleet-calibration"
CALIBRATION_FILE = "calibration.yaml"
MONITOR_DIR = "/etc/npufleet-monitor"
MONITOR_SETTINGS_FILE = "monitor.yaml"
GATEWAY_KEYS_DIR = "/etc/npufleet-keys"
GATEWAY_TLS_DIR = "/etc/npufleet-tls"
MODEL_DIR = "/models"
KV_CACHE_DIR = "/tmp/kv-cache"  # noqa: S108 - the container's own emptyDir
TERMINATION_MESSAGE_PATH = "/dev/termination-log"

POD_NAME_ENV = "POD_NAME"
POD_NAMESPACE_ENV = "POD_NAMESPACE"
POD_UID_ENV = "POD_UID"
POD_IP_ENV = "POD_IP"
HOST_IP_ENV = "HOST_IP"
NPU_EXPORTER_URL_ENV = "NPU_EXPORTER_URL"

HEALTH_PATH = "/health"
READY_PATH = "/ready"
METRICS_PATH = "/metrics"
REPORT_PATH = "/report"
DRAIN_PATH = "/drain"
DRAIN_CANCEL_PATH = "/drain/cancel"
STATE_PATH = "/state"
TERMINATE_PATH = "/terminate"
"""Of the adapter beside vLLM: what the kubelet asks before it ends the engine; answered once nothing runs, or the time is over."""

MODEL_LOADED_HEADER = "x-npufleet-model"
REPLICA_HEADER = "x-npufleet-replica"
REQUEST_ID_HEADER = "x-request-id"
SESSION_HEADER = "x-npufleet-session"
"""Requests of a model with the same value go to the same replica as long as it is ready and holds no more than its share. OpenAI's
`prompt_cache_key` does the same.
"""
CLASS_HEADER = "x-npufleet-class"
"""Workload class that a request claims."""
DEADLINE_HEADER = "x-npufleet-deadline-ms"
"""How long a request would wait for a slot, in milliseconds."""
TIMEOUT_HEADER = "x-npufleet-timeout-ms"
"""How long a request may take in all at its replica, in milliseconds; then it is given up."""
DRAINING_HEADER = "x-npufleet-draining"
"""Set on the 503 by which a draining engine refuses new work: nothing was done, send it elsewhere."""
DRAINING_CODE = "draining"
"""Code of that error, also where it comes as the event of a stream that had heard heartbeats alone."""


class EngineState(StrEnum):
    """Life of an engine."""

    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"
    IDLE = "Idle"
    """Drained: nothing runs and nothing waits."""


class EngineExit(IntEnum):
    """Exit codes of an engine that cannot start, from sysexits.h: they tell the operator whose turn it is."""

    SETTINGS = 78
    """EX_CONFIG: the settings file."""
    MODEL = 65
    """EX_DATAERR: the model's files."""
    DEVICE = 69
    """EX_UNAVAILABLE: the device is absent, or too small."""


class AdminState(BaseModel):
    """Answer of `GET /state`, `POST /drain` and `POST /drain/cancel` on the engine's admin port."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: EngineState
    running: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    waiting: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    drain_deadline_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] | None = None
    """Seconds left until running requests are given up; None unless draining."""


class DrainRequest(BaseModel):
    """Body of `POST /drain`. Repeating it is harmless: the earliest deadline holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deadline_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
    reason: Annotated[str, StringConstraints(max_length=64)] = ""
