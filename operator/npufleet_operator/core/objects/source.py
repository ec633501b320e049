"""How a model's files reach its engine: a volume, an image, or a fetch container that fills a cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from npufleet_api.contract import (
    ADMIN_PORT,
    MODEL_DIR,
    SETTINGS_DIR,
    TERMINATION_MESSAGE_PATH,
)
from npufleet_api.fetching import (
    CACHE_DIR,
    CREDENTIALS_DIR,
    CURRENT_LINK,
    FETCH_CONTAINER,
    FETCH_SETTINGS_FILE,
    SOURCE_REVISION_ANNOTATION,
    SOURCE_REVISION_ENV,
    FetchSettings,
)
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import InferencePoolSpec
from npufleet_api.sources import Scheme, known_uri, parse_uri
from npufleet_operator.core.objects.common import CONTAINER_SECURITY, Manifest, without_none
from npufleet_operator.core.observed import ModelView, OperatorConfig

FETCH_RESOURCES = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
"""Beside the engine's: an init container's requests count only where they are larger than those of all containers."""
MODEL_VOLUME = "model"
CACHE_VOLUME = "model-cache"
CREDENTIALS_VOLUME = "source-credentials"
MIB_PER_GIB = 1024


@dataclass(frozen=True, slots=True)
class MountedSource:
    """Volumes of the pod, and the engine's mounts of them."""

    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    pull_secrets: tuple[str, ...] = ()
    fetched: bool = False


def model_source(spec: AscendModelSpec, pool: InferencePoolSpec) -> MountedSource:
    """Volumes and mounts of a model that was accepted."""
    uri = parse_uri(spec.model.uri)
    if uri.scheme is Scheme.VOLUME:
        volume = {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": uri.root, "readOnly": True}}
        mount = without_none({"name": MODEL_VOLUME, "mountPath": MODEL_DIR, "readOnly": True, "subPath": uri.path or None})
        return MountedSource((volume,), (mount,))
    if uri.scheme is Scheme.OCI:
        volume = {"name": MODEL_VOLUME, "image": {"reference": uri.location, "pullPolicy": "IfNotPresent"}}
        mount = {"name": MODEL_VOLUME, "mountPath": MODEL_DIR, "readOnly": True}
        secrets = (spec.model.secret_ref.name,) if spec.model.secret_ref else ()
        return MountedSource((volume,), (mount,), secrets)
    volumes = ({"name": MODEL_VOLUME, "emptyDir": {}}, cache_volume(pool), *credentials_volume(spec))
    mounts = (
        {"name": MODEL_VOLUME, "mountPath": MODEL_DIR, "readOnly": True},
        {"name": CACHE_VOLUME, "mountPath": CACHE_DIR, "readOnly": True},
    )
    return MountedSource(volumes, mounts, fetched=True)


def model_dir(spec: AscendModelSpec) -> str:
    """Where the engine of a model that was accepted finds its files."""
    return f"{MODEL_DIR}/{CURRENT_LINK}" if parse_uri(spec.model.uri).fetched else MODEL_DIR


def cache_volume(pool: InferencePoolSpec) -> Manifest:
    """The pool's cache; without one, the pod's own disk."""
    cache = pool.models.cache
    if cache is None:
        return {"name": CACHE_VOLUME, "emptyDir": {}}
    if cache.claim_name is not None:
        return {"name": CACHE_VOLUME, "persistentVolumeClaim": {"claimName": cache.claim_name}}
    return {"name": CACHE_VOLUME, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}


def credentials_volume(spec: AscendModelSpec) -> tuple[Manifest, ...]:
    """Optional, so that a Secret that is missing is told in one line instead of holding the pod back in silence."""
    name = spec.model.secret_ref.name if spec.model.secret_ref else "npufleet-no-credentials"
    return ({"name": CREDENTIALS_VOLUME, "secret": {"secretName": name, "optional": True, "defaultMode": 0o440}},)


def fetch_settings(namespace: str, spec: AscendModelSpec, pool: InferencePoolSpec) -> FetchSettings | None:
    """`fetch.yaml` of a model; None where nothing is fetched. What was fetched with credentials is kept to its namespace."""
    uri = parse_uri(spec.model.uri)
    if not uri.fetched:
        return None
    model, policy = spec.model, pool.models
    default = policy.endpoint(uri.scheme)
    limit = policy.cache.size_limit_gi if policy.cache else None
    return FetchSettings(
        uri=str(uri),
        revision=model.revision,
        endpoint=model.endpoint or (default.url if default else None),
        region=model.region or (default.region if default else None),
        files=sorted(model.files),
        digest=model.digest,
        allow_pickle=policy.allow_pickle,
        scope=namespace if model.secret_ref else "",
        credentials=model.secret_ref is not None,
        size_limit_mi=limit * MIB_PER_GIB if limit else None,
    )


def fetch_document(settings: FetchSettings) -> dict[str, Any]:
    """The content of `fetch.yaml`."""
    return settings.model_dump(mode="json", by_alias=True, exclude_none=True)


def fetch_container(pool: InferencePoolSpec, config: OperatorConfig, *, only_cache: bool = False) -> Manifest:
    """Fetches before the engine starts; with `only_cache` it fills the cache for pods to come."""
    template = pool.pod_template
    flags = ["--only-cache"] if only_cache else []
    annotation = {"fieldRef": {"fieldPath": f"metadata.annotations['{SOURCE_REVISION_ANNOTATION}']"}}
    return {
        "name": FETCH_CONTAINER,
        "image": template.images.engine or config.engine_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": ["npufleet-fetch", "run", "--settings", f"{SETTINGS_DIR}/{FETCH_SETTINGS_FILE}", *flags],
        "env": [{"name": SOURCE_REVISION_ENV, "valueFrom": annotation}, *(v.model_dump(by_alias=True) for v in template.env)],
        "ports": [{"name": "progress", "containerPort": ADMIN_PORT, "protocol": "TCP"}],
        "resources": FETCH_RESOURCES,
        "terminationMessagePath": TERMINATION_MESSAGE_PATH,
        "terminationMessagePolicy": "File",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "settings", "mountPath": SETTINGS_DIR, "readOnly": True},
            *([] if only_cache else [{"name": MODEL_VOLUME, "mountPath": MODEL_DIR}]),
            {"name": CACHE_VOLUME, "mountPath": CACHE_DIR},
            {"name": CREDENTIALS_VOLUME, "mountPath": CREDENTIALS_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the container's own emptyDir
        ],
    }


def asked(spec: AscendModelSpec) -> str:
    """What a resolved revision belongs to: it holds as long as this is the same."""
    model = spec.model
    # A digest: sixteen patterns would not fit into the status's field.
    files = f"files:{hashlib.sha256(chr(0).join(sorted(model.files)).encode()).hexdigest()[:16]}" if model.files else ""
    return " ".join(part for part in (model.uri, model.revision or "", model.endpoint or "", model.region or "", files) if part)


def resolved_revision(model: ModelView) -> str:
    """The revision that the model's first replica resolved; empty where none has, or where something else is asked for now."""
    source = model.status.source
    if source is None or model.spec is None or source.asked != asked(model.spec):
        return ""
    return source.revision


def is_fetched(spec: AscendModelSpec) -> bool:
    """Whether the model's files are fetched."""
    uri = known_uri(spec.model.uri)
    return uri is not None and uri.fetched
