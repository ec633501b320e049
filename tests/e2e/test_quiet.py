"""While nothing happens, nothing is written to the API server."""

from __future__ import annotations

import json
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from demo.install import NAMESPACE
from support.team import Team, operator_metrics, settled

QUIET_SECONDS = 40
"""Longer than every period in which npufleet looks again or writes figures, but the watchdog's, which only reads."""
PATIENCE_SECONDS = 180
"""What went before may still be going: the SLO's window has to empty, for one."""
KINDS = "npupools,ascendmodels,pods,services,configmaps,poddisruptionbudgets,networkpolicies,deployments"
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def _writes(team: Team) -> tuple[float, Any]:
    """Requests by which the operator wrote so far, and the version of everything that is npufleet's."""
    count = 0.0
    for family in text_string_to_metric_families(operator_metrics(team.kubectl)):
        if family.name == "npufleet_operator_api_requests":
            count += sum(s.value for s in family.samples if s.name.endswith("_total") and s.labels["method"] in WRITES)
    versions = {}
    for scope in (team.namespace, NAMESPACE):
        for item in json.loads(team.kubectl.cluster.run_kubectl("-n", scope, "get", KINDS, "-o", "json"))["items"]:
            metadata = item["metadata"]
            versions[(item["kind"], metadata.get("namespace", ""), metadata["name"])] = metadata["resourceVersion"]
    return count, versions


def test_a_quiet_cluster_sees_no_write(served: Team) -> None:
    seen, since = _writes(served), time.monotonic()
    assert seen[0] > 0, "the operator has written to get here"
    assert len(seen[1]) > 10

    def quiet() -> bool:
        nonlocal seen, since
        time.sleep(2)
        now = _writes(served)
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > QUIET_SECONDS

    settled(f"{QUIET_SECONDS} s without a write", quiet, PATIENCE_SECONDS)
    assert served.chat("tiny") == "4 tokens"
