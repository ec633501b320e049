"""CustomResourceDefinitions from the resource models.

Pydantic writes JSON Schema; the API server wants a structural schema: no $ref, no anyOf for optional fields, no titles, and defaults
only where the field may be omitted. `crd()` converts one into the other and adds names, printer columns and subresources.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from npufleet_api import GROUP, MODEL_KIND, MODEL_PLURAL, POOL_KIND, POOL_PLURAL, VERSION
from npufleet_api.model import AscendModelSpec, AscendModelStatus
from npufleet_api.pool import InferencePoolSpec, InferencePoolStatus

Schema = dict[str, Any]
_DROPPED = {"title", "$defs", "propertyNames", "maxPropertyNames"}


def _columns(*columns: tuple[str, str, str] | tuple[str, str, str, int]) -> list[Schema]:
    return [{"name": c[0], "type": c[1], "jsonPath": c[2], **({"priority": c[3]} if len(c) > 3 else {})} for c in columns]


def inference_pool_crd() -> Schema:
    """The CRD of InferencePool: cluster-scoped, and clear of the Gateway API inference extension's plural."""
    return _crd(
        kind=POOL_KIND,
        plural=POOL_PLURAL,
        singular="npupool",
        short_names=["npool", "inferencepool", "inferencepools"],
        scope="Cluster",
        spec=InferencePoolSpec,
        status=InferencePoolStatus,
        columns=_columns(
            ("CAPACITY", "integer", ".status.nominal"),
            ("SUPPLY", "integer", ".status.supply", 1),
            ("ALLOCATED", "integer", ".status.allocated"),
            ("DRAINING", "integer", ".status.draining"),
            ("READY", "string", '.status.conditions[?(@.type=="Ready")].status'),
            ("REASON", "string", '.status.conditions[?(@.type=="Ready")].reason', 1),
            ("AGE", "date", ".metadata.creationTimestamp"),
        ),
    )


def ascend_model_crd() -> Schema:
    """The CRD of AscendModel: namespaced; `amodel`, since `am` is Alertmanager's."""
    return _crd(
        kind=MODEL_KIND,
        plural=MODEL_PLURAL,
        singular="ascendmodel",
        short_names=["amodel"],
        scope="Namespaced",
        spec=AscendModelSpec,
        status=AscendModelStatus,
        columns=_columns(
            ("CLASS", "string", ".spec.workloadClass"),
            ("REPLICAS", "integer", ".status.replicas"),
            ("READY", "integer", ".status.readyReplicas"),
            ("NPUS", "integer", ".status.npus"),
            ("SLO", "integer", ".status.slo.attainmentPercent"),
            ("TTFT-P95", "integer", ".status.slo.ttftP95Milliseconds"),
            ("STATUS", "string", '.status.conditions[?(@.type=="Ready")].reason'),
            ("AGE", "date", ".metadata.creationTimestamp"),
        ),
    )


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural OpenAPI schema of `model`, by alias."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    converted = _convert(raw, raw.get("$defs", {}))
    if not isinstance(converted, dict):
        raise TypeError(f"schema of {model.__name__} is not an object")
    return converted


def _crd(
    *,
    kind: str,
    plural: str,
    singular: str,
    short_names: list[str],
    scope: str,
    spec: type[BaseModel],
    status: type[BaseModel],
    columns: list[Schema],
) -> Schema:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": singular,
                "shortNames": short_names,
                "categories": ["npufleet"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": columns,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": structural_schema(spec),
                                "status": structural_schema(status),
                            },
                        }
                    },
                }
            ],
        },
    }


def _convert(node: Any, defs: Schema) -> Any:
    if isinstance(node, list):
        return [_convert(item, defs) for item in node]
    if not isinstance(node, dict):
        return node
    node = _resolve(node, defs)
    if "properties" in node:
        node["properties"] = {name: _convert(value, defs) for name, value in node["properties"].items()}
        for name in node.get("required", []):
            node["properties"][name].pop("default", None)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _convert(node[key], defs)
    if "patternProperties" in node:
        (value,) = node.pop("patternProperties").values()
        node["additionalProperties"] = _convert(value, defs)
    if node.get("additionalProperties") is False:
        del node["additionalProperties"]
    return node


def _resolve(node: Schema, defs: Schema) -> Schema:
    """One level without $ref, optional unions and what the API server does not take; what stands beside a $ref wins over it."""
    node = {key: value for key, value in node.items() if key not in _DROPPED}
    if "allOf" in node and len(node["allOf"]) == 1:
        node = {**_resolve(node.pop("allOf")[0], defs), **node}
    if "$ref" in node:
        target = defs[node.pop("$ref").rsplit("/", 1)[-1]]
        node = {**_resolve(target, defs), **node}
    if "anyOf" in node:
        members = [member for member in node.pop("anyOf") if member.get("type") != "null"]
        if len(members) != 1:
            raise TypeError(f"a field may be one type or absent, not {members}")
        node = {**_resolve(members[0], defs), **node}
    if "default" in node:
        # The API server refuses a null inside a default of a field that is not nullable.
        default = _without_null(node.pop("default"))
        if default is not None:
            node["default"] = default
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "exclusiveMinimum" in node:
        raise TypeError("use ge, not gt: the API server wants exclusiveMinimum as a boolean")
    return node


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return value
