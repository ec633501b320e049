"""The examples against the real API server's schema, and the mixed load planned on this cluster's NPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from demo.install import ROOT, apply
from devcluster import Cluster
from support.team import Json, give_node_to, settled

EXAMPLES = ROOT / "examples"
MIXED = EXAMPLES / "mixed-load"


def _documents(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_is_taken_by_the_api_server_as_it_stands(installed: Cluster, path: Path) -> None:
    """Unknown fields are errors. A namespace that the example brings along is not there yet in a dry run: another one stands for it."""
    brought = {d["metadata"]["name"] for d in _documents(path) if d["kind"] == "Namespace"}
    known = set(installed.run_kubectl("get", "namespaces", "-o", "jsonpath={.items[*].metadata.name}").split())
    for document in _documents(path):
        metadata = document["metadata"]
        if metadata.get("namespace") in brought - known or metadata.get("namespace", "default") not in known:
            metadata["namespace"] = "default"
        installed.run_kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(document))


@pytest.fixture
def mixed_load(installed: Cluster) -> Iterator[Cluster]:
    """The example of a mixed load, applied. The node is no other pool's meanwhile; the RuntimeClass stands for a site's."""
    give_node_to(installed, "mixed-load")
    apply(installed, [{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "ascend"}, "handler": "runc"}])
    installed.run_kubectl("apply", "-f", str(MIXED))
    yield installed
    installed.run_kubectl("delete", "-f", str(MIXED), "--wait=true")
    installed.run_kubectl("delete", "runtimeclass", "ascend")
    give_node_to(installed, "e2e")


def test_the_mixed_load_is_accepted_and_charged_within_each_guarantee(mixed_load: Cluster) -> None:
    cards = mixed_load.settings.npu.count
    models = {d["metadata"]["name"]: d["spec"] for d in _documents(MIXED / "models.yaml")}

    def planned() -> dict[str, Json] | None:
        listed = json.loads(mixed_load.run_kubectl("-n", "default", "get", "amodel", "-o", "json"))["items"]
        found = {m["metadata"]["name"]: m.get("status", {}) for m in listed if m["metadata"]["name"] in models}
        return found if len(found) == len(models) and all(status.get("npus") for status in found.values()) else None

    found = settled("every model to be charged", planned)
    for status in found.values():
        conditions = {condition["type"]: condition for condition in status["conditions"]}
        for kind in ("Accepted", "CapacityAvailable"):
            assert conditions[kind]["status"] == "True", conditions[kind]["message"]
        assert conditions["NotYetEffective"]["status"] == "False"

    def ledger() -> Json | None:
        status = json.loads(mixed_load.run_kubectl("get", "npool", "mixed-load", "-o", "json")).get("status", {})
        return status if sum(entry["used"] for entry in status.get("classes", [])) == len(models) else None

    pool = settled("the ledger to show them", ledger)
    assert pool["nominal"] == cards
    assert {entry["name"]: (entry["guaranteed"], entry["ceiling"], entry["used"]) for entry in pool["classes"]} == {
        spec["workloadClass"]: (cards // 4, cards * 3 // 4, 1) for spec in models.values()
    }
    assert not any(entry["borrowed"] for entry in pool["classes"])
    told = {name: {c["type"]: c for c in status["conditions"]}["Available"] for name, status in found.items()}
    assert all(condition["status"] == "False" for condition in told.values()), "their volume is the reader's to bring"
