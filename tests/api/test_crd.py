"""The CRDs: generated, up to date, structural, and kept clear of other projects' names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet_api.crd import ascend_model_crd, inference_pool_crd

ROOT = Path(__file__).resolve().parents[2]
CRDS = {crd["metadata"]["name"]: crd for crd in (inference_pool_crd(), ascend_model_crd())}


def nodes(crd: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node of a CRD, with its path."""
    (version,) = crd["spec"]["versions"]

    def walk(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield path, node
        for name, child in node.get("properties", {}).items():
            yield from walk(f"{path}.{name}", child)
        for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(node.get(key), dict):
                yield from walk(path + mark, node[key])

    for part in ("spec", "status"):
        yield from walk(part, version["schema"]["openAPIV3Schema"]["properties"][part])


@pytest.mark.parametrize("folder", ["crds", "charts/npufleet/crds"])
@pytest.mark.parametrize("name", CRDS)
def test_the_files_are_what_the_models_say(folder: str, name: str) -> None:
    text = (ROOT / folder / f"{name}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == CRDS[name], "run `make crds`"


def test_the_generator_checks_what_it_would_write() -> None:
    result = subprocess.run([sys.executable, "crds/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", CRDS)
def test_every_number_list_text_and_map_is_bounded(name: str) -> None:
    unbounded = [path for path, node in nodes(CRDS[name]) if path.startswith("spec") and not _is_bounded(node)]
    assert not unbounded


def _is_bounded(node: dict[str, Any]) -> bool:
    match node["type"]:
        case "integer" | "number":
            return ("minimum" in node and "maximum" in node) or "enum" in node
        case "string":
            return "maxLength" in node or "enum" in node
        case "array":
            return "maxItems" in node and "x-kubernetes-list-type" in node
        case "object":
            return "properties" in node or "maxProperties" in node
        case _:
            return True


@pytest.mark.parametrize("name", CRDS)
def test_every_list_has_a_list_type(name: str) -> None:
    assert not [path for path, node in nodes(CRDS[name]) if node["type"] == "array" and "x-kubernetes-list-type" not in node]


@pytest.mark.parametrize("name", CRDS)
def test_every_field_of_a_spec_says_what_a_change_does(name: str) -> None:
    """Fields inside list items and selectors are covered by the list's own description."""
    silent = [
        path
        for path, node in nodes(CRDS[name])
        if path.startswith("spec.") and "[]" not in path and "{}" not in path and not _says_what_a_change_does(path, node)
    ]
    assert not silent


def _says_what_a_change_does(path: str, node: dict[str, Any]) -> bool:
    inherits = {
        "spec.classes",
        "spec.poolRef.name",
        "spec.model.secretRef.name",
        "spec.engine.calibrationRef.name",
    }  # their parent, or their items, say it
    return path in inherits or "A change " in node.get("description", "")


def test_names_stay_clear_of_the_gateway_api_inference_extension() -> None:
    names = inference_pool_crd()["spec"]["names"]
    assert names["plural"] == "npupools"
    assert names["singular"] == "npupool"
    assert "infpool" not in names["shortNames"]


@pytest.mark.parametrize("name", CRDS)
def test_status_is_a_subresource(name: str) -> None:
    (version,) = CRDS[name]["spec"]["versions"]
    assert version["subresources"] == {"status": {}}


@pytest.mark.parametrize("name", CRDS)
def test_no_default_holds_null(name: str) -> None:
    """kubectl drops a null on its way; server-side apply, which Helm uses, sends it, and the API server refuses the whole CRD."""

    def holds_null(value: Any) -> bool:
        return value is None or (isinstance(value, dict) and any(holds_null(item) for item in value.values()))

    assert not [path for path, node in nodes(CRDS[name]) if "default" in node and holds_null(node["default"])]
