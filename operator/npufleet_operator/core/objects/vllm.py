"""The engine container of runtime VLLMAscend: vllm-ascend's image under the same contract as the native engine."""

from __future__ import annotations

from npufleet_api.contract import ADMIN_PORT, ENGINE_PORT, HEALTH_PATH, READY_PATH, TERMINATE_PATH
from npufleet_api.model import AscendModelSpec, ResolvedEngine
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.settings import ShutdownSettings
from npufleet_operator.core.objects.common import NON_ROOT_UID, Manifest
from npufleet_operator.core.vllm_arguments import BLOCK_SIZE, vllm_arguments

HOME = "/tmp"  # noqa: S108  # the container's own emptyDir
USERS_FILE = "passwd"
USERS = f"root:x:0:0:root:/root:/bin/bash\nnpufleet:x:{NON_ROOT_UID}:{NON_ROOT_UID}::{HOME}:/sbin/nologin\n"
"""vllm-ascend's image knows no user but root, and HCCL starts no second rank for a user without an entry (vllm-ascend #9490)."""
USERS_MOUNT: Manifest = {"name": "settings", "mountPath": "/etc/passwd", "subPath": USERS_FILE, "readOnly": True}

ENVIRONMENT = {
    "HOME": HOME,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The root file system is read-only, and nothing is fetched but by npufleet. What the pool's podTemplate.env says goes before it."""

START = (
    "for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do "
    'if [ -f "$file" ]; then . "$file"; fi; done; exec vllm serve "$@"'
)
"""The image sets CANN up for login shells only. Arguments are the shell's own: none of them is read as code."""

STARTUP_SECONDS = 3600
"""Until vLLM answers: it listens once the model is loaded and its graphs are compiled."""
STARTUP_PERIOD_SECONDS = 5


def vllm_container(namespace: str, name: str, spec: AscendModelSpec, pool: InferencePoolSpec) -> Manifest:
    """What differs from the native engine's container. `env` holds additions only. The monitor knows of drains, so it tells readiness."""
    given = {variable.name for variable in pool.pod_template.env}
    return {
        "image": vllm_image(spec, pool),
        "command": ["/bin/bash", "-c", START, "vllm"],
        "args": list(vllm_arguments(namespace, name, spec)),
        "env": [{"name": key, "value": value} for key, value in ENVIRONMENT.items() if key not in given],
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": {
            "httpGet": {"path": HEALTH_PATH, "port": ENGINE_PORT},
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
            "failureThreshold": STARTUP_SECONDS // STARTUP_PERIOD_SECONDS,
        },
        "readinessProbe": {
            "httpGet": {"path": READY_PATH, "port": ADMIN_PORT},
            "periodSeconds": 2,
            "timeoutSeconds": 3,
            "failureThreshold": 2,
        },
    }


def vllm_image(spec: AscendModelSpec, pool: InferencePoolSpec) -> str:
    """The image of a model that was accepted: its own choice, or the only one that the pool allows."""
    return spec.runtime.image or next(iter(pool.pod_template.allowed_images), "")


def pre_stop(shutdown: ShutdownSettings) -> Manifest:
    """vLLM drops what runs on SIGTERM: the kubelet first asks the monitor, which answers once nothing runs."""
    query = f"accept_seconds={shutdown.accept_seconds:g}&drain_seconds={shutdown.drain_seconds:g}"
    return {"httpGet": {"path": f"{TERMINATE_PATH}?{query}", "port": ADMIN_PORT}}


def vllm_resolved(native: ResolvedEngine, spec: AscendModelSpec) -> ResolvedEngine:
    """What the model's status shows: `native` without what vLLM decides by itself."""
    return native.model_copy(
        update={
            "block_size": int(BLOCK_SIZE),
            "chunked_prefill": spec.engine.chunked_prefill,
            "preemption": None,
            "scheduling_policy": None,
            "pipeline_depth": None,
        }
    )
