"""Labels, owner references and security contexts that the builders share."""

from __future__ import annotations

from typing import Any

from npufleet_api import API_VERSION, MODEL_KIND
from npufleet_api.contract import (
    CLASS_LABEL,
    COMPONENT_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    MODEL_LABEL,
    MODEL_NAME_ANNOTATION,
    POOL_LABEL,
    POOL_NAME_ANNOTATION,
)
from npufleet_operator.core.naming import slug
from npufleet_operator.core.observed import ModelView

Manifest = dict[str, Any]

NON_ROOT_UID = 65532
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": NON_ROOT_UID,
    "runAsGroup": NON_ROOT_UID,
    "fsGroup": NON_ROOT_UID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def model_selector(model: ModelView) -> dict[str, str]:
    """Labels that select the model's pods within its namespace."""
    return {MANAGED_BY_LABEL: MANAGED_BY, MODEL_LABEL: slug(model.name)}


def model_labels(model: ModelView) -> dict[str, str]:
    """Labels of every child of a model."""
    return {
        **model_selector(model),
        COMPONENT_LABEL: "inference",
        POOL_LABEL: slug(model.pool_name),
        CLASS_LABEL: model.spec.workload_class if model.spec else "",
    }


def model_metadata(model: ModelView, name: str) -> Manifest:
    """Metadata of a child of a model: named, labelled and owned."""
    return {
        "name": name,
        "namespace": model.namespace,
        "labels": model_labels(model),
        "annotations": {MODEL_NAME_ANNOTATION: model.name, POOL_NAME_ANNOTATION: model.pool_name},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": MODEL_KIND,
                "name": model.name,
                "uid": model.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def without_none(manifest: Manifest) -> Manifest:
    """The manifest without keys whose value is None or empty."""
    return {key: value for key, value in manifest.items() if value not in (None, [], {})}
