"""A pool's gateway: Deployment and Service in the operator's namespace, without an owner: a pool deleted by mistake is not cut off."""

from __future__ import annotations

from npufleet_api.contract import (
    COMPONENT_LABEL,
    GATEWAY_KEYS_DIR,
    GATEWAY_PORT,
    GATEWAY_TLS_DIR,
    GATEWAY_TLS_PORT,
    HEALTH_PATH,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    POOL_LABEL,
    POOL_NAME_ANNOTATION,
    READY_PATH,
)
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.naming import gateway_child, slug
from npufleet_operator.core.objects.common import CONTAINER_SECURITY, POD_SECURITY, Manifest, without_none
from npufleet_operator.core.objects.pod import identity_env
from npufleet_operator.core.observed import OperatorConfig

GATEWAY_COMPONENT = "gateway"
DEFAULT_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
GRACE_SECONDS = 150


def gateway_labels(pool: str) -> dict[str, str]:
    """Labels of the gateway's objects and pods."""
    return {MANAGED_BY_LABEL: MANAGED_BY, COMPONENT_LABEL: GATEWAY_COMPONENT, POOL_LABEL: slug(pool)}


def tls_only(spec: InferencePoolSpec) -> bool:
    """Whether clients are served with TLS alone."""
    return spec.gateway.tls_only and spec.gateway.tls_secret_name is not None


def gateway_endpoint(pool: str, namespace: str, spec: InferencePoolSpec | None) -> str:
    """OpenAI base URL of the pool inside the cluster. The plain one where the pool is gone."""
    host = f"{gateway_child(pool)}.{namespace}.svc"
    return f"https://{host}:{GATEWAY_TLS_PORT}/v1" if spec is not None and tls_only(spec) else f"http://{host}:{GATEWAY_PORT}/v1"


def build_gateway_service(pool: str, spec: InferencePoolSpec, config: OperatorConfig) -> Manifest:
    """The pool's door; with a second port where it has a certificate, and that alone where clients must use it."""
    ports = [] if tls_only(spec) else [{"name": "http", "port": GATEWAY_PORT, "targetPort": GATEWAY_PORT, "protocol": "TCP"}]
    if spec.gateway.tls_secret_name is not None:
        ports.append({"name": "https", "port": GATEWAY_TLS_PORT, "targetPort": GATEWAY_TLS_PORT, "protocol": "TCP"})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": gateway_metadata(pool, config),
        "spec": {
            "type": config.gateway_service_type,
            "selector": gateway_labels(pool),
            "ports": ports,
        },
    }


def build_gateway_deployment(pool: str, spec: InferencePoolSpec, config: OperatorConfig) -> Manifest:
    """Updated without a gap: a new gateway is ready before an old one ends."""
    labels = gateway_labels(pool)
    gateway = spec.gateway
    arguments = [
        *("npufleet-gateway", "serve", "--pool", pool, "--port", str(GATEWAY_PORT)),
        *("--queue-seconds", str(gateway.queue_seconds), "--hold-seconds", str(gateway.hold_seconds)),
        *("--replica-concurrency", str(gateway.replica_concurrency)),
    ]
    ports = [{"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"}]
    mounts: list[Manifest] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108  # the container's own emptyDir
    volumes: list[Manifest] = [{"name": "tmp", "emptyDir": {}}]
    if gateway.api_keys_secret_name is not None:
        # Optional: without the Secret the gateway runs and refuses every request, rather than being stuck before it starts.
        volumes.append({"name": "keys", "secret": {"secretName": gateway.api_keys_secret_name, "optional": True}})
        mounts.append({"name": "keys", "mountPath": GATEWAY_KEYS_DIR, "readOnly": True})
        arguments += ["--keys-dir", GATEWAY_KEYS_DIR]
    if gateway.tls_secret_name is not None:
        volumes.append({"name": "tls", "secret": {"secretName": gateway.tls_secret_name}})
        mounts.append({"name": "tls", "mountPath": GATEWAY_TLS_DIR, "readOnly": True})
        arguments += ["--tls-dir", GATEWAY_TLS_DIR, "--tls-port", str(GATEWAY_TLS_PORT)]
        if gateway.tls_only:
            arguments.append("--tls-only")
        ports.append({"name": "https", "containerPort": GATEWAY_TLS_PORT, "protocol": "TCP"})
    if gateway.hedging is not None:
        arguments += ["--hedge-budget-percent", str(gateway.hedging.budget_percent)]
        arguments += ["--hedge-delay-percentile", str(gateway.hedging.delay_percentile)]
    container = {
        "name": "gateway",
        "image": config.control_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": arguments,
        "env": identity_env(),
        "ports": ports,
        "resources": dict(config.gateway_resources) or DEFAULT_RESOURCES,
        "readinessProbe": {"httpGet": {"path": READY_PATH, "port": GATEWAY_PORT}, "periodSeconds": 2, "timeoutSeconds": 2},
        "livenessProbe": {
            "httpGet": {"path": HEALTH_PATH, "port": GATEWAY_PORT},
            "initialDelaySeconds": 20,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": gateway_metadata(pool, config),
        "spec": {
            "replicas": spec.gateway.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {"labels": labels, "annotations": {POOL_NAME_ANNOTATION: pool}},
                "spec": without_none(
                    {
                        "serviceAccountName": config.gateway_service_account,
                        "securityContext": POD_SECURITY,
                        "terminationGracePeriodSeconds": GRACE_SECONDS,
                        "imagePullSecrets": [{"name": name} for name in config.image_pull_secrets],
                        "containers": [container],
                        "volumes": volumes,
                    }
                ),
            },
        },
    }


def gateway_metadata(pool: str, config: OperatorConfig) -> Manifest:
    """Metadata of the gateway's objects."""
    return {
        "name": gateway_child(pool),
        "namespace": config.namespace,
        "labels": gateway_labels(pool),
        "annotations": {POOL_NAME_ANNOTATION: pool},
    }
