"""Where requests go, as clients and the gateway's report see it, and that restarts around the path disturb none."""

from __future__ import annotations

import time

import httpx

from demo.install import NAMESPACE
from npufleet_api.contract import REPLICA_HEADER, SESSION_HEADER
from npufleet_api.report import GatewayReport, ModelTraffic, parse_gateway_report
from support.team import Team, operator_pod, settled

CONVERSATIONS = 4
TURNS = 4
PREFIX_CHARACTERS = 1300
"""More than one cut of `npufleet_api.prefix`, and few enough for the tiny model's context."""


def ask(team: Team, text: str, session: str = "") -> str:
    """A completion through the gateway; the replica that answered."""
    body = {"model": f"{team.namespace}/tiny", "prompt": text, "max_tokens": 2, "ignore_eos": True}
    headers = {SESSION_HEADER: session} if session else {}
    answer = httpx.post(f"http://{team.address}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers[REPLICA_HEADER]


def report(team: Team) -> GatewayReport:
    """The gateway's report, parsed as the operator parses it."""
    return parse_gateway_report(httpx.get(f"http://{team.address}/report", timeout=30).raise_for_status().content)


def traffic(team: Team) -> ModelTraffic:
    """The model's part of it."""
    return next(model for model in report(team).models if model.namespace == team.namespace)


def two_replicas(team: Team) -> None:
    team.apply_model("tiny", replicas=2, slo={"ttftMilliseconds": 60_000})
    team.wait_ready("tiny")
    settled("two routed replicas", lambda: sum(replica.ready for replica in traffic(team).replicas) == 2)


def test_conversations_stay_where_their_prefix_is_and_the_report_shows_it(team: Team) -> None:
    two_replicas(team)
    beginnings = [f"{number} " * (PREFIX_CHARACTERS // 2) for number in range(CONVERSATIONS)]
    placed = [[ask(team, f"{beginning}turn {turn}") for turn in range(TURNS)] for beginning in beginnings]
    assert [len(set(replicas)) for replicas in placed] == [1] * CONVERSATIONS
    assert len({replicas[0] for replicas in placed}) == 2, "conversations are spread over the replicas"
    sessions = [ask(team, "hello", "s1") for _ in range(TURNS)]
    assert len(set(sessions)) == 1
    found = traffic(team)
    asked = CONVERSATIONS * TURNS + TURNS
    assert (found.outcomes.ok, found.judged, found.attained) == (asked, asked, asked)
    assert {part.workload_class: part.judged for part in found.classes} == {found.classes[0].workload_class: asked}
    settled("both monitors in the report", lambda: traffic(team).engines.reporting == 2)
    hits = settled("prefix hits in the report", lambda: _prefix_hits(team))
    assert max(hits) > 0
    assert all(replica.report and replica.report.engine and replica.report.engine.kv_cache_tokens for replica in traffic(team).replicas)


def _prefix_hits(team: Team) -> list[float]:
    reports = [replica.report for replica in traffic(team).replicas]
    return [r.engine.prefix_hit_percent for r in reports if r is not None and r.engine is not None and r.engine.prefix_hit_percent]


def test_restarts_of_operator_and_api_server_fail_no_request(team: Team) -> None:
    two_replicas(team)
    cluster = team.kubectl.cluster
    with team.traffic("tiny", clients=3) as clients:
        settled("traffic", lambda: clients.complete > 3)
        before = settled("the operator", lambda: operator_pod(team.kubectl))["metadata"]["name"]
        cluster.run_kubectl("-n", NAMESPACE, "delete", "pod", before, "--wait=false")
        settled("another operator", lambda: (pod := operator_pod(team.kubectl)) and pod["metadata"]["name"] != before, 120)
        cluster.stop("kube-apiserver")
        time.sleep(2)  # long enough for every watch to notice
        cluster.start("kube-apiserver")
        cluster.wait_healthy()
        asked = clients.complete
        settled("traffic after both", lambda: clients.complete > asked + 5)
        settled("the gateway's view follows again", lambda: report(team).view_age_seconds < 30)
    assert clients.outcomes.failures == []
    assert len(clients.outcomes.replicas) == 2
    assert len(team.ready_pods("tiny")) == 2
