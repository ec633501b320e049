"""What a model owner got wrong reaches a condition of the model, with the field and the remedy in its message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from demo.install import ROOT, apply
from devcluster import Cluster
from support.team import Json, Team, give_node_to, pool_manifest, settled
from support.tiny_model import write_tiny_model


class Mistake(NamedTuple):
    """What is wrong in a spec, and what is told where."""

    spec: Json
    condition: str
    reason: str
    words: tuple[str, ...]


def _on_volume(path: str) -> Json:
    return {"model": {"uri": f"pvc://models/{path}"}}


MISTAKES = {
    "no-claim": Mistake(
        {"model": {"uri": "pvc://absent"}},
        "Available",
        "ModelUnavailable",
        ("spec.model.uri", '"absent" not found', "create the claim in the model's namespace"),
    ),
    "no-folder": Mistake(_on_volume("nowhere"), "Available", "ModelUnavailable", ("modelPath", "empty", "model.uri")),
    "empty": Mistake(_on_volume("empty"), "Available", "ModelUnavailable", ("modelPath", "empty", "copy the model's files")),
    "truncated": Mistake(
        _on_volume("truncated"), "Available", "ModelUnavailable", ("model.safetensors", "truncated", "copy the file again")
    ),
    "unknown": Mistake(
        _on_volume("unknown"), "Available", "ModelUnavailable", ("architectures", "NovelForCausalLM", "use a model of LlamaForCausalLM")
    ),
    "too-long": Mistake(
        {**_on_volume("good"), "engine": {"maxModelLength": 4096}},
        "Available",
        "SpecRefused",
        ("maxModelLength", "4096", "max_position_embeddings 2048", "lower maxModelLength"),
    ),
    "no-class": Mistake(
        {"workloadClass": "fast"}, "Accepted", "ClassNotFound", ("spec.workloadClass", "'fast'", "choose one of: chat, locked")
    ),
    "not-allowed": Mistake(
        {"workloadClass": "locked"}, "Accepted", "NamespaceNotAllowed", ("spec.workloadClass", "namespaceSelector", "choose another class")
    ),
    "no-pool": Mistake(
        {"poolRef": {"name": "nowhere"}}, "Accepted", "PoolNotFound", ("spec.poolRef.name", "'nowhere'", "create it or name another")
    ),
    "ceiling": Mistake(
        {"workloadClass": "small"}, "CapacityAvailable", "CeilingBelowReplica", ("takes 1 NPU(s)", "'small' may hold 0", "maxPercent")
    ),
    "scheme": Mistake(
        {"model": {"uri": "obs://bucket/model"}}, "Accepted", "SpecRefused", ("spec.model.region", "obs://", "set spec.model.region")
    ),
    "vllm": Mistake({"runtime": {"name": "VLLMAscend"}}, "Accepted", "ImageNotAllowed", ("spec.runtime.name", "set it to Native")),
    "pipeline": Mistake({"parallelism": {"pipeline": 2}}, "Accepted", "NotImplemented", ("spec.parallelism.pipeline", "set it to 1")),
    "no-memory": Mistake(
        {**_on_volume("good"), "resources": {"memory": "900Ti"}}, "Available", "Unschedulable", ("Insufficient memory", "0/1 nodes")
    ),
}
CLASSES: list[Json] = [
    {"name": "chat", "priority": 3, "maxPercent": 100},
    {"name": "locked", "priority": 2, "namespaceSelector": {"matchLabels": {"team": "platform"}}},
    {"name": "small", "priority": 1, "maxPercent": 10},
]


@pytest.fixture(scope="session")
def broken_folder(tiny_folder: Path) -> Path:
    """Models as they should not be, and a good one."""
    root = tiny_folder.parent / "models"
    (root / "empty").mkdir(parents=True)
    write_tiny_model(root / "good")
    weights = write_tiny_model(root / "truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    write_tiny_model(root / "unknown", config={"architectures": ["NovelForCausalLM"]})
    return root


@pytest.fixture
def absent_image(served: Team, installed: Cluster) -> Iterator[str]:
    """A pool whose engine image does not exist. It has the node while `served` goes on."""
    name = "absent-image"
    template = {"device": "CPU", "shmSizeMi": 16, "images": {"engine": "devcluster.local/absent:1"}}
    give_node_to(installed, name)
    apply(installed, [pool_manifest(name, podTemplate=template)])
    yield name
    installed.run_kubectl("delete", "npool", name)
    give_node_to(installed, served.pool)


def test_each_mistake_is_told_with_field_and_remedy(own_pool: Callable[..., Team], broken_folder: Path) -> None:
    team = own_pool(classes=CLASSES)
    team.add_volume("models", broken_folder)
    manifests = [team.manifest(name, **mistake.spec) for name, mistake in MISTAKES.items()]
    apply(team.kubectl.cluster, manifests)
    missing = dict(MISTAKES)

    def all_told() -> bool:
        told = {model["metadata"]["name"]: _conditions(model) for model in team.kubectl.list("amodel")}
        for name, mistake in list(missing.items()):
            condition = told[name].get(mistake.condition, {})
            if condition.get("reason") == mistake.reason and all(word in condition["message"] for word in mistake.words):
                assert condition["status"] == "False"
                assert told[name]["Ready"]["status"] == "False"
                del missing[name]
        return not missing

    try:
        settled("every mistake to be told", all_told, 90)
    except AssertionError as error:
        seen = {name: _conditions(team.model(name)).get(mistake.condition) for name, mistake in missing.items()}
        raise AssertionError(f"not told, or otherwise: {json.dumps(seen, indent=1)}") from error
    assert not any(pod["status"].get("containerStatuses", [{}])[0].get("ready") for pod in team.kubectl.list("pods"))


def _conditions(model: Json) -> dict[str, Json]:
    return {condition["type"]: condition for condition in model.get("status", {}).get("conditions", [])}


def test_a_served_name_belongs_to_the_older_model_and_the_other_is_told(served: Team) -> None:
    taken = served.manifest("tiny")["spec"]["model"]
    served.apply_model("late", replicas=0, model=taken)
    told = served.wait_condition("late", "Routed", "False", "ServedNameTaken")
    for words in ("spec.model.servedName", f"{served.namespace}/tiny", f"{served.namespace}/late", "choose another servedName"):
        assert words in told["message"]
    assert served.condition("tiny", "Routed")["status"] == "True"  # type: ignore[index] # it was there before
    served.kubectl("delete", "amodel", "late")


def test_an_absent_image_and_a_full_pool_are_told(absent_image: str, served: Team) -> None:
    cards = served.kubectl.cluster.settings.npu.count
    served.apply_model("crowd", poolRef={"name": absent_image}, replicas=cards)
    image = served.wait_condition("crowd", "Available", "False", "ImagePullFailed")
    assert "devcluster.local/absent:1" in image["message"]
    full = served.wait_condition("crowd", "CapacityAvailable", "False", "NoCapacity")
    for words in (f"{cards} replicas of 1 NPU(s) are wanted", "free some, ask for fewer replicas, or add nodes"):
        assert words in full["message"]
    assert len(served.pods("crowd")) < cards
    assert served.chat("tiny") == "4 tokens"
    served.kubectl("delete", "amodel", "crowd")


def test_the_example_of_a_large_model_gets_an_honest_condition(served: Team) -> None:
    installed = served.kubectl.cluster
    manifest = str(ROOT / "examples" / "qwen72b.yaml")
    try:
        installed.run_kubectl("apply", "-f", manifest)

        def told() -> dict[str, Json]:
            conditions = _conditions(_get(installed, "amodel", "qwen72b", "-n", "team-a"))
            return conditions if "CapacityAvailable" in conditions else {}

        conditions = settled("CapacityAvailable", told)
        assert conditions["Accepted"]["status"] == "True"
        capacity = conditions["CapacityAvailable"]
        assert (capacity["status"], capacity["reason"]) == ("False", "NoNodes"), "an older pool has the nodes"
        assert "of 4 NPU(s) are wanted" in capacity["message"]
        pool = settled("the pool's conditions", lambda: _conditions(_get(installed, "npool", "prod")))
        assert pool["Accepted"]["status"] == "True"
        assert pool["NotYetEffective"]["status"] == "False", pool["NotYetEffective"]["message"]
    finally:
        installed.run_kubectl("delete", "-f", manifest, "--wait=false")


def _get(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(cluster.run_kubectl("get", *arguments, "-o", "json")))
