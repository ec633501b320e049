"""The inference pod: the engine, and the monitor as a native sidecar."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from npufleet_api.contract import (
    ADMIN_PORT,
    CALIBRATION_DIR,
    ENGINE_CONTAINER,
    ENGINE_PORT,
    ENGINE_SETTINGS_FILE,
    HEALTH_PATH,
    HOST_IP_ENV,
    MONITOR_CONTAINER,
    MONITOR_DIR,
    MONITOR_PORT,
    MONITOR_SETTINGS_FILE,
    NPU_EXPORTER_URL_ENV,
    POD_IP_ENV,
    POD_NAME_ENV,
    POD_NAMESPACE_ENV,
    POD_UID_ENV,
    READY_PATH,
    REVISION_LABEL,
    SETTINGS_DIR,
    SLOT_LABEL,
    TERMINATION_MESSAGE_PATH,
)
from npufleet_api.fetching import SOURCE_ASKED_ANNOTATION, SOURCE_REVISION_ANNOTATION, FetchSettings
from npufleet_api.model import AscendModelSpec, ResolvedEngine, RuntimeName
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.settings import EngineSettings
from npufleet_operator.core.engine_settings import engine_settings, resolved, settings_document
from npufleet_operator.core.naming import REVISION_LENGTH, monitor_child, pod_name, settings_child
from npufleet_operator.core.objects.common import CONTAINER_SECURITY, POD_SECURITY, Manifest, model_labels, model_metadata, without_none
from npufleet_operator.core.objects.source import (
    MountedSource,
    asked,
    fetch_container,
    fetch_document,
    fetch_settings,
    model_source,
    resolved_revision,
)
from npufleet_operator.core.objects.vllm import USERS_MOUNT, pre_stop, vllm_container, vllm_resolved
from npufleet_operator.core.observed import ModelView, OperatorConfig

GRACE_MARGIN_SECONDS = 30
"""Beyond the drain: the engine's own shutdown, and the seconds in which it still accepts while endpoints change."""

MONITOR_RESOURCES = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What every replica of one revision of a model looks like."""

    revision: str
    settings: EngineSettings
    pod_spec: Manifest
    resolved: ResolvedEngine
    """What the model's status shows of `settings`."""
    fetch: FetchSettings | None = None
    """How the model's files are fetched; None where they are mounted."""
    runtime: RuntimeName = RuntimeName.NATIVE


def blueprint(model: ModelView, spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig) -> Blueprint:
    """Settings, pod spec and revision. What the pool may change live (drainSeconds) is not part of the revision."""
    settings = engine_settings(model.namespace, model.name, spec, pool)
    fetch = fetch_settings(model.namespace, spec, pool)
    pod_spec = _pod_spec(model, spec, pool, config)
    rolled = settings.model_copy(update={"shutdown": settings.shutdown.model_copy(update={"drain_seconds": 0.0})})
    parts = [pod_spec, settings_document(rolled), model_labels(model), *([fetch_document(fetch)] if fetch else [])]
    hashed = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    revision = hashlib.sha256(hashed.encode()).hexdigest()[:REVISION_LENGTH]
    shown = resolved(settings)
    if spec.runtime.name is RuntimeName.VLLM_ASCEND:
        shown = vllm_resolved(shown, spec)
    return Blueprint(revision, settings, pod_spec, shown, fetch, spec.runtime.name)


def build_pod(model: ModelView, plan: Blueprint, slot: int, node: str = "") -> Manifest:
    """The replica in `slot`. It prefers the node where the planner has its place, so that replicas are packed; another one will do."""
    metadata = model_metadata(model, pod_name(model.name, plan.revision, slot))
    metadata["labels"] = {**metadata["labels"], REVISION_LABEL: plan.revision, SLOT_LABEL: str(slot)}
    if plan.fetch is not None and model.spec is not None:
        pinned = resolved_revision(model)
        metadata["annotations"] = {
            **metadata["annotations"],
            SOURCE_ASKED_ANNOTATION: asked(model.spec),
            **({SOURCE_REVISION_ANNOTATION: pinned} if pinned else {}),
        }
    grace = int(plan.settings.shutdown.accept_seconds + plan.settings.shutdown.drain_seconds) + GRACE_MARGIN_SECONDS
    settings_volume = {"name": "settings", "configMap": {"name": settings_child(model.name, plan.revision)}}
    containers = plan.pod_spec["containers"]
    if plan.runtime is RuntimeName.VLLM_ASCEND:
        containers = [{**engine, "lifecycle": {"preStop": pre_stop(plan.settings.shutdown)}} for engine in containers]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            **plan.pod_spec,
            **({"affinity": _preference(node)} if node else {}),
            "containers": containers,
            "terminationGracePeriodSeconds": grace,
            "volumes": [settings_volume, *plan.pod_spec["volumes"]],
        },
    }


def _preference(node: str) -> Manifest:
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]}}


def _pod_spec(model: ModelView, spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig) -> Manifest:
    template = pool.pod_template
    source = model_source(spec, pool)
    security: Manifest = {**POD_SECURITY}
    if template.supplemental_groups:
        security["supplementalGroups"] = sorted(template.supplemental_groups)
    volumes: list[Manifest] = [
        {"name": "monitor-settings", "configMap": {"name": monitor_child(model.name)}},
        *source.volumes,
        *_calibration_volume(spec),
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{template.shm_size_mi}Mi"}},
        *({"name": f"driver-{v.name}", "hostPath": {"path": v.host_path}} for v in template.driver_volumes),
    ]
    pull_secrets = [*config.image_pull_secrets, *template.image_pull_secrets, *source.pull_secrets]
    return without_none(
        {
            "restartPolicy": "Always",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": security,
            "nodeSelector": {**pool.npus.node_selector, **template.node_selector},
            "tolerations": [t.model_dump(by_alias=True, exclude_none=True) for t in template.tolerations],
            "runtimeClassName": template.runtime_class_name,
            "schedulerName": template.scheduler_name,
            "priorityClassName": template.priority_class_name,
            "imagePullSecrets": [{"name": name} for name in dict.fromkeys(pull_secrets)],
            "initContainers": _init_containers(spec, pool, config, source),
            "containers": [_engine(model, spec, pool, config, source)],
            "volumes": volumes,
        }
    )


def _init_containers(spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig, source: MountedSource) -> list[Manifest]:
    """The monitor comes last where it serves the admin port: the fetch container holds that port until it ends."""
    fetch = [fetch_container(pool, config)] if source.fetched else []
    if spec.runtime.name is RuntimeName.VLLM_ASCEND:
        return [*fetch, _monitor(pool, config, vllm=True)]
    return [_monitor(pool, config), *fetch]


def _engine(model: ModelView, spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig, source: MountedSource) -> Manifest:
    native = _native_engine(spec, pool, config, source)
    if spec.runtime.name is not RuntimeName.VLLM_ASCEND:
        return native
    container = {**native, **vllm_container(model.namespace, model.name, spec, pool)}
    container["env"] = [*native["env"], *container["env"]]
    container["volumeMounts"] = [USERS_MOUNT, *(m for m in native["volumeMounts"] if m["name"] != "settings")]
    return container


def _native_engine(spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig, source: MountedSource) -> Manifest:
    template = pool.pod_template
    npus = {pool.npus.resource_name: str(spec.parallelism.npus)}
    return {
        "name": ENGINE_CONTAINER,
        "image": template.images.engine or config.engine_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["npufleet-pod", "serve", "--settings", f"{SETTINGS_DIR}/{ENGINE_SETTINGS_FILE}"],
        "env": [*identity_env(), *(v.model_dump(by_alias=True) for v in template.env)],
        "ports": [
            {"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": spec.resources.cpu, "memory": spec.resources.memory, **npus},
            "limits": {"memory": spec.resources.memory, **npus},
        },
        "readinessProbe": {
            "httpGet": {"path": READY_PATH, "port": ENGINE_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": HEALTH_PATH, "port": ENGINE_PORT},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "terminationMessagePath": TERMINATION_MESSAGE_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_DIR, "readOnly": True},
            *source.mounts,
            *({"name": v["name"], "mountPath": CALIBRATION_DIR, "readOnly": True} for v in _calibration_volume(spec)),
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the container's own emptyDir
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # the container's own emptyDir
            *({"name": f"driver-{v.name}", "mountPath": v.mount_path, "readOnly": True} for v in template.driver_volumes),
        ],
    }


def _calibration_volume(spec: AscendModelSpec) -> list[Manifest]:
    """Optional, so that a ConfigMap that is missing is told by the engine in one line instead of holding the pod back in silence."""
    if spec.engine.calibration_ref is None:
        return []
    return [{"name": "calibration", "configMap": {"name": spec.engine.calibration_ref.name, "optional": True}}]


def _monitor(pool: InferencePoolSpec, config: OperatorConfig, *, vllm: bool = False) -> Manifest:
    """No probes: a failing one would hold the engine back, and a crash of the monitor must not stop traffic. `vllm`: it serves the admin
    port for the engine beside it."""
    command = ["npufleet-monitor", "serve", "--settings", f"{MONITOR_DIR}/{MONITOR_SETTINGS_FILE}"]
    ports = [{"name": "monitor", "containerPort": MONITOR_PORT, "protocol": "TCP"}]
    if vllm:
        command += ["--vllm-url", f"http://127.0.0.1:{ENGINE_PORT}"]
        ports.append({"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"})
    return {
        "name": MONITOR_CONTAINER,
        "restartPolicy": "Always",
        "image": pool.pod_template.images.monitor or config.control_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": command,
        "env": [*identity_env(), *_exporter_env(config)],
        "ports": ports,
        "resources": MONITOR_RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "monitor-settings", "mountPath": MONITOR_DIR, "readOnly": True}],
    }


def _exporter_env(config: OperatorConfig) -> list[Manifest]:
    """npu-exporter runs on every node: the kubelet puts the node's address in for $(HOST_IP)."""
    if not config.npu_exporter_url:
        return []
    host = {"name": HOST_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    return [host, {"name": NPU_EXPORTER_URL_ENV, "value": config.npu_exporter_url}]


def identity_env() -> list[Any]:
    """The pod's own name, namespace, UID and address, for logs and reports."""
    fields = {
        POD_NAME_ENV: "metadata.name",
        POD_NAMESPACE_ENV: "metadata.namespace",
        POD_UID_ENV: "metadata.uid",
        POD_IP_ENV: "status.podIP",
    }
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
