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
ALONE = [[path] for path in sorted(EXAMPLES.glob("*.yaml"))]
TOGETHER = [sorted(folder.glob("*.yaml")) for folder in sorted(EXAMPLES.iterdir()) if folder.is_dir()]
"""The files of a folder are one example."""


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [document for path in paths for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def fields(model: type[Any]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def test_there_are_examples() -> None:
    assert {"smollm2.yaml", "qwen72b.yaml", "three-classes.yaml"} <= {path.name for paths in ALONE for path in paths}
    assert [[path.name for path in paths] for paths in TOGETHER] == [["models.yaml", "pool.yaml"]] * 2


@pytest.mark.parametrize("paths", [*ALONE, *TOGETHER], ids=lambda paths: "+".join(path.name for path in paths))
def test_an_example_parses_and_its_parts_fit_together(paths: list[Path]) -> None:
    pools: dict[str, InferencePoolSpec] = {}
    models: list[tuple[str, AscendModelSpec]] = []
    for document in documents(*paths):
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
            assert document["kind"] == "Namespace", (
                f"{paths[0].parent.name} has a {document['kind']}: examples are pools, models and namespaces"
            )
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
