"""Children of a model: what someone breaks is repaired, what someone adds is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from support.team import Json, Team

CHILD = "npufleet-tiny"


class Edit(NamedTuple):
    """A merge patch (or a JSON patch, where it is a list) to a child, and where to look whether it was undone."""

    kind: str
    patch: Json | list[Json]
    watched: Callable[[Json], Any]


def _spec(child: Json) -> Any:
    return child["spec"]


EDITS = {
    "port changed": Edit(
        "service", {"spec": {"ports": [{"name": "http", "port": 8111, "targetPort": 8111}]}}, lambda c: c["spec"]["ports"]
    ),
    "target port changed": Edit(
        "service", {"spec": {"ports": [{"name": "http", "port": 8000, "targetPort": 1}]}}, lambda c: c["spec"]["ports"]
    ),
    "selector changed": Edit("service", {"spec": {"selector": {"npufleet.dev/model": "other"}}}, lambda c: c["spec"]["selector"]),
    "selector narrowed": Edit("service", {"spec": {"selector": {"tier": "none"}}}, lambda c: c["spec"]["selector"]),
    "budget lowered": Edit("poddisruptionbudget", {"spec": {"minAvailable": 0}}, _spec),
    "budget of another form": Edit("poddisruptionbudget", {"spec": {"minAvailable": None, "maxUnavailable": 1}}, _spec),
    "budget narrowed": Edit("poddisruptionbudget", {"spec": {"selector": {"matchLabels": {"tier": "none"}}}}, _spec),
    "policy opened": Edit("networkpolicy", {"spec": {"ingress": [{}]}}, _spec),
    "policy widened in a rule": Edit(
        "networkpolicy",
        [{"op": "add", "path": "/spec/ingress/0/from/1/namespaceSelector", "value": {}}],
        _spec,
    ),
    "policy widened in a port": Edit("networkpolicy", [{"op": "add", "path": "/spec/ingress/1/ports/0/endPort", "value": 9000}], _spec),
    "policy narrowed": Edit("networkpolicy", {"spec": {"podSelector": {"matchLabels": {"tier": "none"}}}}, _spec),
    "labels removed": Edit(
        "networkpolicy", {"metadata": {"labels": {"npufleet.dev/model": None}}}, lambda c: c["metadata"]["labels"].get("npufleet.dev/model")
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_child_is_repaired(served: Team, name: str) -> None:
    edit = EDITS[name]
    before = edit.watched(served.kubectl.get(edit.kind, CHILD))
    form = "json" if isinstance(edit.patch, list) else "merge"
    served.kubectl("patch", edit.kind, CHILD, f"--type={form}", "-p", json.dumps(edit.patch))
    served.kubectl.wait(f"{edit.kind} to be as before", lambda: edit.watched(served.kubectl.get(edit.kind, CHILD)) == before)


def test_edited_settings_are_repaired(served: Team) -> None:
    before = {name: served.kubectl.get("configmap", name)["data"] for name in _settings(served)}
    assert len(before) == 2
    for name, data in before.items():
        broken = {"data": dict.fromkeys(data, "device: NPU")}
        served.kubectl("patch", "configmap", name, "--type=merge", "-p", json.dumps(broken))
    served.kubectl.wait("them to be as before", lambda: all(served.kubectl.get("configmap", n)["data"] == d for n, d in before.items()))


def _settings(team: Team) -> list[str]:
    return [m["metadata"]["name"] for m in team.kubectl.list("configmaps", "app.kubernetes.io/managed-by=npufleet-operator")]


def test_a_deleted_child_comes_back_and_no_pod_is_replaced(served: Team) -> None:
    pods = [pod["metadata"]["uid"] for pod in served.pods("tiny")]
    children = [
        ("service", CHILD),
        ("poddisruptionbudget", CHILD),
        ("networkpolicy", CHILD),
        *(("configmap", m) for m in _settings(served)),
    ]
    uids = {child: served.kubectl.get(*child)["metadata"]["uid"] for child in children}
    for kind, name in children:
        served.kubectl("delete", kind, name, "--wait=false")
    served.kubectl.wait("others in their place", lambda: all(served.kubectl.get(*c)["metadata"]["uid"] != uid for c, uid in uids.items()))
    assert [pod["metadata"]["uid"] for pod in served.pods("tiny")] == pods
    assert served.chat("tiny") == "4 tokens"


def test_what_others_add_to_a_child_is_left_alone(served: Team) -> None:
    added = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": CHILD, "labels": {"example.com/tier": "gold"}, "annotations": {"example.com/owner": "network team"}},
        "spec": {"publishNotReadyAddresses": True, "ports": [{"name": "extra", "port": 9999, "targetPort": 9999, "protocol": "TCP"}]},
    }
    served.kubectl("apply", "--server-side", "--field-manager=network-team", "-f", "-", stdin=json.dumps(added))
    # A broken field beside them makes the operator write the object.
    served.kubectl(
        "patch", "service", CHILD, "--type=merge", "-p", json.dumps({"metadata": {"annotations": {"npufleet.dev/model-name": "x"}}})
    )

    def repaired() -> Json | None:
        child = served.kubectl.get("service", CHILD)
        return child if child["metadata"]["annotations"]["npufleet.dev/model-name"] == "tiny" else None

    child = served.kubectl.wait("the annotation to be repaired", repaired)
    assert child["metadata"]["labels"]["example.com/tier"] == "gold"
    assert child["metadata"]["annotations"]["example.com/owner"] == "network team"
    assert child["spec"]["publishNotReadyAddresses"] is True
    assert {port["port"] for port in child["spec"]["ports"]} == {8000, 9999}


def test_an_object_of_ours_by_name_only_is_left_alone_and_told(served: Team) -> None:
    name = "npufleet-other"
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}}
    served.kubectl.apply(theirs)
    served.apply_model("other", replicas=0)
    told = served.wait_condition("other", "Available", "False", "CreateRefused")
    assert f"Service {name} exists and is not npufleet's: delete or rename it" in told["message"]
    assert served.kubectl.get("service", name)["spec"]["selector"] == {"a": "b"}
    served.kubectl("delete", "service", name)
    served.kubectl.wait("our own service", lambda: served.kubectl.get("service", name)["spec"]["clusterIP"] == "None")
    served.kubectl("delete", "amodel", "other")
