"""The Job that brings a model into a cache before a replica needs it."""

from __future__ import annotations

import hashlib

from npufleet_api.contract import COMPONENT_LABEL, REVISION_LABEL
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.naming import settings_child
from npufleet_operator.core.objects.common import POD_SECURITY, Manifest, model_metadata, without_none
from npufleet_operator.core.objects.source import cache_volume, credentials_volume, fetch_container
from npufleet_operator.core.observed import ModelView, OperatorConfig

PRELOAD_COMPONENT = "preload"
RETRIES = 3


def preload_job_name(model: str, revision: str, node: str) -> str:
    """One for each revision and node; a shared volume needs one in all."""
    suffix = hashlib.sha256(node.encode()).hexdigest()[:6] if node else "shared"
    return f"{settings_child(model, revision)}-{suffix}"


def build_preload_job(
    model: ModelView, spec: AscendModelSpec, pool: InferencePoolSpec, config: OperatorConfig, revision: str, node: str
) -> Manifest:
    """Fetch what `revision` serves into the cache of `node`, or into the shared one. It asks for no NPU, and its pods carry no label by
    which a replica is known."""
    metadata = model_metadata(model, preload_job_name(model.name, revision, node))
    metadata["labels"] = {**metadata["labels"], COMPONENT_LABEL: PRELOAD_COMPONENT, REVISION_LABEL: revision}
    template, preload = pool.pod_template, pool.models.preload
    place = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [place]}}}
    pod_spec = without_none(
        {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {**POD_SECURITY},
            "affinity": affinity if node else None,
            "tolerations": [t.model_dump(by_alias=True, exclude_none=True) for t in template.tolerations],
            "priorityClassName": preload.priority_class_name,
            "imagePullSecrets": [{"name": name} for name in dict.fromkeys([*config.image_pull_secrets, *template.image_pull_secrets])],
            "containers": [fetch_container(pool, config, only_cache=True)],
            "volumes": [
                {"name": "settings", "configMap": {"name": settings_child(model.name, revision)}},
                cache_volume(pool),
                *credentials_volume(spec),
                {"name": "tmp", "emptyDir": {}},
            ],
        }
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": preload.timeout_seconds,
            "template": {"metadata": {"labels": {COMPONENT_LABEL: PRELOAD_COMPONENT}}, "spec": pod_spec},
        },
    }
