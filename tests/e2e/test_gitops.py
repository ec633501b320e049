"""Flux, Argo CD and people apply the same manifests again and again: nothing differs, nothing happens."""

from __future__ import annotations

import json
from typing import Any

from support.team import Json, Team

FLUX = ("--server-side", "--field-manager=flux", "--force-conflicts")


def test_the_same_manifest_applied_again_changes_nothing(team: Team) -> None:
    manifest = team.manifest("tiny")
    text = json.dumps(manifest)
    team.kubectl("apply", "-f", "-", stdin=text)
    team.wait_ready("tiny")
    before = _state(team)
    assert team.kubectl("apply", "-f", "-", stdin=text).endswith("unchanged\n")
    team.kubectl("diff", "-f", "-", stdin=text)  # exits with 1 where there is a difference
    for _ in range(2):
        team.kubectl("apply", *FLUX, "-f", "-", stdin=text)
        team.kubectl("diff", *FLUX, "-f", "-", stdin=text)
    assert _state(team) == before


def _state(team: Team) -> tuple[Any, ...]:
    model = team.model("tiny")
    pods = [(pod["metadata"]["uid"], pod["metadata"]["labels"]) for pod in team.pods("tiny")]
    return model["metadata"]["generation"], model["spec"], model["status"]["observedGeneration"], model["status"]["revision"], pods


def test_the_operator_owns_nothing_of_a_spec(team: Team) -> None:
    team.apply_model("tiny", replicas=0)
    team.wait_condition("tiny", "Ready", "False", "ScaledToZero")
    model = json.loads(team.kubectl("get", "amodel", "tiny", "-o", "json", "--show-managed-fields"))
    owned = {entry["manager"]: (entry.get("subresource", ""), list(entry["fieldsV1"])) for entry in model["metadata"]["managedFields"]}
    ours: Json = {manager: fields for manager, fields in owned.items() if manager.startswith("npufleet-operator")}
    assert ours == {"npufleet-operator-status": ("status", ["f:status"])}


def test_a_field_taken_out_of_the_manifest_falls_back_to_its_default(team: Team) -> None:
    team.apply_model("tiny", replicas=0, engine={"maxNumSequences": 7})
    team.wait_condition("tiny", "Ready", "False", "ScaledToZero")
    assert team.model("tiny")["status"]["engine"]["maxNumSequences"] == 7
    team.apply_model("tiny", replicas=0, engine={})
    team.wait_condition("tiny", "Ready", "False", "ScaledToZero")
    team.kubectl.wait("the profile's own size", lambda: team.model("tiny")["status"]["engine"]["maxNumSequences"] != 7)
