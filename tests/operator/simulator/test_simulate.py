"""Whole runs: the same seed gives the same figures, every request ends once, and no policy loses one."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from npufleet_api.slo import Exchange, Judgement, Outcome, SloTargets, judge
from npufleet_operator.errors import InputError
from npufleet_operator.simulator.allocations import candidates, fits, static_split
from npufleet_operator.simulator.policies import Deployments, Npufleet
from npufleet_operator.simulator.request import Request
from npufleet_operator.simulator.scenario import Scenario, load_scenario
from npufleet_operator.simulator.simulate import POLICIES, POLICY_NAMES, Simulation, simulate
from npufleet_operator.simulator.traces import TraceRequest
from npufleet_operator.simulator.workload import ClosedLoop, Traces

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mixed-load"
CHAT, DOCUMENT, CODE = ("default", "chatglm3-6b"), ("default", "llama2-13b"), ("default", "qwen-14b")
MINUTES = 4 * 60.0


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return load_scenario(EXAMPLE / "pool.yaml", EXAMPLE / "models.yaml")


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "oracle"])
def test_a_seed_gives_the_same_figures_again_and_another_seed_others(scenario: Scenario, policy: str) -> None:
    first = simulate(scenario, ClosedLoop(40), policy, MINUTES, seed=7)
    assert simulate(scenario, ClosedLoop(40), policy, MINUTES, seed=7) == first
    assert simulate(scenario, ClosedLoop(40), policy, MINUTES, seed=8) != first


@pytest.mark.parametrize("policy", [name for name in POLICY_NAMES if name != "oracle"])
@pytest.mark.parametrize("clients", [1, 60, 700])
def test_every_request_ends_once_and_none_is_lost(scenario: Scenario, policy: str, clients: int) -> None:
    result = simulate(scenario, ClosedLoop(clients), policy, MINUTES, seed=1)
    assert result.requests >= clients
    assert result.lost_requests == 0
    assert 0 <= result.attainment_percent <= 100
    assert 0 < result.npu_hours <= 8 * MINUTES / 3600
    assert 0 < result.utilisation_percent <= 100


def test_attainment_is_what_the_gateways_definitions_say(scenario: Scenario) -> None:
    seen: list[tuple[tuple[str, str], Exchange]] = []
    simulation = Simulation(scenario, ClosedLoop(60), MINUTES, 3)
    inner = simulation.gateway._finished

    def listen(request: Request, judgement: Judgement) -> None:
        seen.append((request.model, request.exchange(simulation.clock.now)))
        inner(request, judgement)

    simulation.gateway._finished = listen
    result = simulation.run(Deployments(), static_split(scenario))
    targets = {CHAT: SloTargets(1000, 60), DOCUMENT: SloTargets(8000, 120), CODE: SloTargets(2000, 80)}
    judged = [judge(exchange, targets[model]) for model, exchange in seen]
    assert result.attainment_percent == round(100 * sum(j.attained for j in judged) / sum(j.judged for j in judged), 2)
    assert len(seen) == result.requests


def test_the_reports_are_reports_and_their_windows_agree_with_what_clients_saw(scenario: Scenario) -> None:
    simulation = Simulation(scenario, ClosedLoop(30), 120, 3)
    simulation.run(Deployments(), static_split(scenario))
    cluster = simulation.cluster
    report = simulation.gateway.report(list(cluster.pods.values()), cluster.replicas, cluster.load_seconds)
    parsed = type(report).model_validate_json(report.model_dump_json())
    assert parsed == report
    for traffic in parsed.models:
        assert traffic.judged == traffic.outcomes.ok
        assert traffic.in_flight == 0
        assert sum(replica.in_flight for replica in traffic.replicas) == 0
        for replica in traffic.replicas:
            assert replica.report is not None
            assert replica.report.engine is not None
            assert replica.report.engine.load_seconds


def test_the_oracle_is_at_least_as_good_as_the_static_split(scenario: Scenario) -> None:
    split = static_split(scenario)
    assert split in candidates(scenario)
    assert all(fits(scenario, allocation) for allocation in candidates(scenario))
    static, oracle = (simulate(scenario, ClosedLoop(50), name, 60, seed=2) for name in ("static", "oracle"))
    assert oracle.attainment_percent >= static.attainment_percent


def test_traces_arrive_at_their_times_whatever_the_policy(scenario: Scenario) -> None:
    requests = [TraceRequest(0.5 * index, 100 + index, 20) for index in range(100)]
    workload = Traces([(CHAT, requests), (CODE, requests[:10])])
    results = [simulate(scenario.with_lengths(dict(workload.of)), workload, name, 40, seed=1) for name in ("static", "hpa", "npufleet")]
    assert {result.requests for result in results} == {80 + 10}
    assert "document" not in results[0].attainment_by_class


def test_a_failed_card_interrupts_only_what_it_served_and_the_planner_goes_on(scenario: Scenario) -> None:
    simulation = Simulation(scenario, ClosedLoop(60), MINUTES, 5)
    simulation.clock.at(60, lambda: simulation.cluster.fail_cards("node-0", 2))
    result = simulation.run(Npufleet(), static_split(scenario))
    assert simulation.cluster.charged() <= 6
    assert result.lost_requests <= 2 * 128


@settings(max_examples=10)
@given(st.integers(1, 80), st.integers(0, 10**6), st.sampled_from(["npufleet", "hpa", "kpa"]), st.integers(1, 110), st.integers(0, 3))
def test_every_request_ends_whatever_fails(clients: int, seed: int, policy: str, at: int, cards: int) -> None:
    scenario = load_scenario(EXAMPLE / "pool.yaml", EXAMPLE / "models.yaml")
    simulation = Simulation(scenario, ClosedLoop(clients), 120, seed)
    simulation.clock.at(at, lambda: simulation.cluster.fail_cards("node-0", cards))
    result = simulation.run(POLICIES[policy](), static_split(scenario))
    assert sum(book.outcomes.total() for book in simulation._books.values()) == result.requests
    assert all(outcome in set(Outcome) for book in simulation._books.values() for outcome in book.outcomes)


def write(folder: Path, name: str, old: str, new: str) -> Path:
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    assert old in text
    path = folder / name
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("models.yaml", "workloadClass: chat", "workloadClass: chatter", "spec.workloadClass: the pool has no class 'chatter'"),
        ("models.yaml", "{name: mixed-load}", "{name: other}", "spec.poolRef.name: 'other' is not the pool"),
        ("models.yaml", '"40"', '"-1"', "share"),
        ("models.yaml", "simulate.npufleet.dev/share", "simulate.npufleet.dev/shares", "shares"),
        ("models.yaml", '"128"', '"many"', "input-tokens"),
        ("models.yaml", "minReplicas: 1", "minReplicas: -1", "spec.scaling.minReplicas"),
        ("models.yaml", "pvc://weights/chatglm3-6b", "pvc://weights/secret", ""),
        ("models.yaml", "name: llama2-13b", "name: chatglm3-6b", "more than once"),
        ("models.yaml", "kind: AscendModel", "kind: AscendModel\n  x: [", "YAML"),
        ("models.yaml", "{cpu:", "{tensor:", ""),
        ("models.yaml", "npufleet.dev/v1alpha1", "npufleet.dev/v9", "apiVersion: 'npufleet.dev/v9'"),
        ("pool.yaml", "910B3}", "H200}", "'H200' has no figures"),
        ("pool.yaml", "minPercent: 25, maxPercent: 75}", "minPercent: 25, maxPercent: 7500}", "maxPercent"),
        ("pool.yaml", "kind: InferencePool", "kind: Deployment", "exactly one"),
        ("pool.yaml", 'nodes: "1"', 'nodes: "0"', "nodes"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_with_file_and_field(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    files = {part: EXAMPLE / part for part in ("pool.yaml", "models.yaml")} | {name: write(tmp_path, name, old, new)}
    if not message:
        load_scenario(files["pool.yaml"], files["models.yaml"])
        return
    with pytest.raises(InputError) as caught:
        load_scenario(files["pool.yaml"], files["models.yaml"])
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_model_too_big_for_its_npus_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path, "models.yaml", "simulate.npufleet.dev/share", "simulate.npufleet.dev/shape: qwen2.5-72b\n    simulate.npufleet.dev/share"
    )
    with pytest.raises(InputError, match="145 GB of weights do not fit 1 NPU"):
        load_scenario(EXAMPLE / "pool.yaml", path)


def test_fewest_replicas_that_do_not_fit_are_given_as_far_as_they_do(tmp_path: Path) -> None:
    text = (EXAMPLE / "models.yaml").read_text(encoding="utf-8").replace("minReplicas: 1", "minReplicas: 5")
    (tmp_path / "models.yaml").write_text(text, encoding="utf-8")
    scenario = load_scenario(EXAMPLE / "pool.yaml", tmp_path / "models.yaml")
    assert sum(static_split(scenario).values()) == 8
    for policy in ("npufleet", "static"):
        assert simulate(scenario, ClosedLoop(5), policy, 30, seed=1).lost_requests == 0


def test_where_weights_come_from_is_not_simulated(tmp_path: Path) -> None:
    path = write(tmp_path, "models.yaml", "pvc://weights/chatglm3-6b", "hf://THUDM/chatglm3-6b")
    assert simulate(load_scenario(EXAMPLE / "pool.yaml", path), ClosedLoop(5), "npufleet", 30, seed=1).requests


def test_a_model_that_the_planner_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path, "models.yaml", "poolRef: {name: mixed-load}", "poolRef: {name: mixed-load}\n  parallelism: {tensor: 1, pipeline: 2}"
    )
    with pytest.raises(InputError, match=r"default/chatglm3-6b: spec\.parallelism\.pipeline"):
        simulate(load_scenario(EXAMPLE / "pool.yaml", path), ClosedLoop(5), "npufleet", 30, seed=1)
