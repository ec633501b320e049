"""Whether the installed CRDs know every field that this operator writes. Helm installs CRDs and never upgrades them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from npufleet_api.crd import ascend_model_crd, inference_pool_crd
from npufleet_operator.shell.client import KubeClient
from npufleet_operator.shell.kinds import Kind
from npufleet_operator.shell.metrics import CRD_FIELDS_MISSING

logger = logging.getLogger(__name__)

CRD = Kind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
REMEDY = "kubectl apply --server-side --force-conflicts -f charts/npufleet/crds"


def missing_fields(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Dotted paths of fields that `wanted` has and `live`, both CRDs of one version, has not."""
    return sorted(set(_paths(_schema(wanted))) - set(_paths(_schema(live))))


async def check_crds(client: KubeClient) -> list[str]:
    """Log and count what is missing: a status with an unknown field would be refused as a whole. Raises ApiError."""
    live = {crd["metadata"]["name"]: crd for crd in (await client.list(CRD))[0]}
    missing: list[str] = []
    for wanted in (inference_pool_crd(), ascend_model_crd()):
        name = wanted["metadata"]["name"]
        fields = missing_fields(wanted, live[name]) if name in live else ["everything"]
        CRD_FIELDS_MISSING.labels(name).set(len(fields))
        missing += [f"{name}: {field}" for field in fields]
    if missing:
        logger.error("the installed CRDs are older than this operator", extra={"missing": missing[:10], "remedy": REMEDY})
    return missing


def _schema(crd: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _paths(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in (node.get("properties") or {}).items():
        yield f"{prefix}{name}"
        yield from _paths(child, f"{prefix}{name}.")
    items = node.get("items")
    if isinstance(items, Mapping):
        yield from _paths(items, f"{prefix}[].")
