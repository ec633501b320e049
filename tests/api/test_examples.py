"""Every example parses, and its parts fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from npufleet_api import API_VERSION
from npufleet_api.model import AscendModelSpec
from npufleet_api.pool import Device, InferencePoolSpec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("**/*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def fields(model: type[Any]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_there_are_examples() -> None:
    assert {"smollm2.yaml", "qwen72b.yaml", "three-classes.yaml"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_parses_and_its_parts_fit_together(path: Path) -> None:
    pools: dict[str, InferencePoolSpec] = {}
    models: list[tuple[str, AscendModelSpec]] = []
    for document in documents(path):
        if document["kind"] == "InferencePool":
            assert document["apiVersion"] == API_VERSION
            assert set(document["spec"]) <= fields(InferencePoolSpec), "an unknown field would be dropped silently"
            pools[document["metadata"]["name"]] = InferencePoolSpec.model_validate(document["spec"])
        elif document["kind"] == "AscendModel":
            assert document["apiVersion"] == API_VERSION
            assert document["metadata"]["namespace"]
            assert set(document["spec"]) <= fields(AscendModelSpec), "an unknown field would be dropped silently"
            models.append((document["metadata"]["name"], AscendModelSpec.model_validate(document["spec"])))
        else:
            assert document["kind"] == "Namespace", f"{path.name} has a {document['kind']}: examples are pools, models and namespaces"
    assert pools
    assert models
    for name, model in models:
        pool = pools[model.pool_ref.name]
        assert pool.workload_class(model.workload_class), f"{name} claims class {model.workload_class!r}, which its pool does not have"


def test_the_demo_runs_without_npus() -> None:
    (pool,) = [d for d in documents(EXAMPLES / "smollm2.yaml") if d["kind"] == "InferencePool"]
    assert InferencePoolSpec.model_validate(pool["spec"]).pod_template.device is Device.CPU


def test_the_production_example_needs_npus() -> None:
    (pool,) = [d for d in documents(EXAMPLES / "qwen72b.yaml") if d["kind"] == "InferencePool"]
    assert InferencePoolSpec.model_validate(pool["spec"]).pod_template.device is Device.NPU
