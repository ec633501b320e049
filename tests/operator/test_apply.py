"""Carrying a plan out: what is unchanged is skipped, what is refused is told, what changed meanwhile is observed again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import aiohttp
import pytest

from npufleet_api.conditions import Reason
from npufleet_api.contract import DRAIN_STARTED_ANNOTATION
from npufleet_operator.core.actions import DeletePod, Plan
from npufleet_operator.errors import UnavailableError
from npufleet_operator.shell.apply import Applier
from npufleet_operator.shell.engine_admin import EngineAdmin
from npufleet_operator.shell.kinds import MODEL, POD, POOL, kind_of
from npufleet_operator.shell.mirror import Mirror
from support.fleet import Fleet, model_spec
from support.kube_server import KubeServer, kube_server

MODEL_PATH = "/apis/npufleet.dev/v1alpha1/namespaces/team/ascendmodels/tiny"
POOL_PATH = "/apis/npufleet.dev/v1alpha1/npupools/prod"


@dataclass
class Hands:
    """An applier on a server that holds one pool and one model, and the plan for them."""

    server: KubeServer
    mirror: Mirror
    applier: Applier
    plan: Plan
    clock: list[float]

    async def carry_out(self, plan: Plan | None = None) -> bool:
        self.server.requests.clear()
        return await self.applier.carry_out("prod", plan or self.plan)


@pytest.fixture
async def hands() -> AsyncIterator[Hands]:
    fleet = Fleet()
    fleet.add_model("tiny", model_spec())
    clock = [0.0]
    async with kube_server() as (server, client), aiohttp.ClientSession() as session:
        mirror = Mirror()
        assert fleet.pool is not None
        uid = {"uid": "model-team-tiny"}
        spec = fleet.models[("team", "tiny")].spec
        assert spec is not None
        server.put(POOL_PATH, {"metadata": {"name": "prod"}, "spec": fleet.pool.model_dump(mode="json", by_alias=True, exclude_none=True)})
        server.put(
            MODEL_PATH,
            {
                "metadata": {"name": "tiny", "namespace": "team", **uid},
                "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
            },
        )
        mirror.upsert(POOL, server.objects[POOL_PATH])
        mirror.upsert(MODEL, server.objects[MODEL_PATH])
        applier = Applier(client, mirror, EngineAdmin(session, port=1), lambda: clock[0])
        yield Hands(server, mirror, applier, fleet.plan(), clock)


async def test_everything_is_written_once_and_then_left_alone(hands: Hands) -> None:
    assert not await hands.carry_out()
    written = hands.server.writes()
    assert ("POST", "/api/v1/namespaces/team/pods") in written
    assert ("PATCH", f"{MODEL_PATH}/status") in written
    assert ("PATCH", f"{POOL_PATH}/status") in written
    again = replace(hands.plan, creates=())
    assert not await hands.carry_out(again)
    assert hands.server.writes() == []


async def test_what_a_write_returns_is_known_before_the_watch_tells(hands: Hands) -> None:
    await hands.carry_out()
    assert [pod.owner_name for pod in hands.mirror.pods.values()] == ["tiny"]
    assert hands.mirror.models[("team", "tiny")].status.desired_replicas == 1


async def test_a_taken_pod_name_means_observing_again(hands: Hands) -> None:
    name = hands.plan.creates[0].manifest["metadata"]["name"]
    hands.server.put(f"/api/v1/namespaces/team/pods/{name}", {"metadata": {"name": name, "namespace": "team"}})
    assert await hands.carry_out()


async def test_a_refused_pod_reaches_the_models_condition(hands: Hands) -> None:
    hands.server.fail[("POST", "/api/v1/namespaces/team/pods")] = 403
    assert await hands.carry_out()
    assert "told to fail" in hands.applier.refused[("team", "tiny")]
    hands.server.fail.clear()
    assert await hands.carry_out(), "the condition has to be taken back"
    assert hands.applier.refused == {}


@pytest.mark.parametrize("foreign", [False, True])
async def test_a_job_that_is_refused_holds_no_replica_up(hands: Hands, foreign: bool) -> None:
    (service,) = [o for o in hands.plan.objects if o["kind"] == "Service" and o["metadata"]["namespace"] == "team"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**service["metadata"], "name": "preload"}, "spec": {}}
    path = "/apis/batch/v1/namespaces/team/jobs/preload"
    if foreign:
        hands.server.put(path, {"metadata": {"name": "preload", "namespace": "team", "labels": {"app": "mine"}}})
    else:
        hands.server.fail[("PATCH", path)] = 403
    assert await hands.carry_out(replace(hands.plan, objects=(*hands.plan.objects, job))), "what waits for the job has to be planned again"
    assert ("POST", "/api/v1/namespaces/team/pods") in hands.server.writes()
    assert hands.applier.refused == {}
    assert hands.applier.refused_jobs == {("Job", "team", "preload")}
    await hands.carry_out()
    assert hands.applier.refused_jobs == set()


async def test_an_object_of_someone_else_is_left_alone(hands: Hands) -> None:
    path = "/api/v1/namespaces/team/services/npufleet-tiny"
    mine = {"metadata": {"name": "npufleet-tiny", "namespace": "team", "labels": {"app": "mine"}}, "spec": {"type": "LoadBalancer"}}
    before = hands.server.put(path, mine)
    await hands.carry_out()
    assert hands.server.objects[path] == before
    assert "delete or rename it" in hands.applier.refused[("team", "tiny")]


async def test_an_edited_child_is_repaired(hands: Hands) -> None:
    await hands.carry_out()
    path = "/apis/policy/v1/namespaces/team/poddisruptionbudgets/npufleet-tiny"
    edited = {**hands.server.objects[path], "spec": {"minAvailable": 0}}
    hands.mirror.upsert(kind_of({"kind": "PodDisruptionBudget"}), hands.server.put(path, edited))
    await hands.carry_out(replace(hands.plan, creates=()))
    assert hands.server.objects[path]["spec"]["minAvailable"] == 1


async def test_a_child_that_is_not_wanted_any_more_is_pruned(hands: Hands) -> None:
    await hands.carry_out()
    fewer = tuple(o for o in hands.plan.objects if o["kind"] != "PodDisruptionBudget")
    await hands.carry_out(replace(hands.plan, creates=(), objects=fewer))
    assert hands.server.writes() == [("DELETE", "/apis/policy/v1/namespaces/team/poddisruptionbudgets/npufleet-tiny")]


async def test_measured_figures_alone_are_written_every_half_minute(hands: Hands) -> None:
    await hands.carry_out()
    key = ("team", "tiny")
    status = hands.plan.model_status[key]
    assert status.slo is not None

    def figures(requests: int) -> Plan:
        slo = status.slo.model_copy(update={"requests": requests}) if status.slo else None
        return replace(hands.plan, creates=(), model_status={key: status.model_copy(update={"slo": slo})})

    hands.clock[0] = 29
    await hands.carry_out(figures(5))
    assert hands.server.writes() == []
    hands.clock[0] = 31
    await hands.carry_out(figures(6))
    assert hands.server.writes() == [("PATCH", f"{MODEL_PATH}/status")]
    hands.clock[0] = 32
    await hands.carry_out(replace(figures(6), model_status={key: status.model_copy(update={"ready_replicas": 1})}))
    assert hands.server.writes() == [("PATCH", f"{MODEL_PATH}/status")], "what people wait for is written at once"


async def test_what_agrees_is_not_compared_again_and_an_edit_still_shows(hands: Hands) -> None:
    await hands.carry_out()
    again = replace(hands.plan, creates=())
    for _ in range(3):
        await hands.carry_out(again)
        assert hands.server.writes() == []
    path = "/api/v1/namespaces/team/services/npufleet-tiny"
    live = hands.server.objects[path]
    edited = hands.server.put(path, {**live, "spec": {**live["spec"], "selector": {"app": "other"}}})
    hands.mirror.upsert(kind_of({"kind": "Service"}), edited)
    await hands.carry_out(again)
    assert hands.server.writes() == [("PATCH", path)]


async def test_a_pod_is_deleted_by_its_uid_and_a_namesake_is_left_alone(hands: Hands) -> None:
    await hands.carry_out()
    (pod,) = hands.mirror.pods.values()
    path = f"/api/v1/namespaces/team/pods/{pod.name}"
    namesake = hands.server.put(path, {**hands.server.objects[path], "metadata": {"name": pod.name, "namespace": "team", "uid": "another"}})
    plan = Plan(deletes=(DeletePod(pod, Reason.DRAIN_COMPLETED),))
    assert await hands.carry_out(plan), "it is observed again"
    assert hands.server.objects[path] == namesake
    deletion = next(body for method, _, body in hands.server.requests if method == "DELETE")
    assert deletion["preconditions"] == {"uid": pod.uid}


async def test_an_api_server_that_is_away_ends_the_cycle_and_loses_nothing(hands: Hands) -> None:
    hands.server.fail[("PATCH", "/")] = 503
    with pytest.raises(UnavailableError):
        await hands.carry_out()
    hands.server.fail.clear()
    await hands.carry_out()
    assert ("POST", "/api/v1/namespaces/team/pods") in hands.server.writes()


async def test_a_drain_is_marked_first_even_when_the_engine_does_not_hear_it(hands: Hands) -> None:
    await hands.carry_out()
    pod = next(iter(hands.mirror.pods.values()))
    fleet = Fleet()
    fleet.add_model("tiny", model_spec(replicas=0))
    fleet.pods = {pod.uid: replace(pod, engine_started=True, engine_ready=True, node="node-0", ip="127.0.0.1")}
    plan = fleet.plan()
    assert len(plan.drains) == 1
    await hands.carry_out(replace(plan, objects=(), prune_owners=frozenset()))
    stored = hands.server.objects[f"/api/v1/namespaces/team/pods/{pod.name}"]
    assert DRAIN_STARTED_ANNOTATION in stored["metadata"]["annotations"]
    assert hands.mirror.pods[pod.key].drain_started is not None
    assert hands.mirror.version(("Pod", *pod.key)) is not None
    assert POD.path("team", pod.name) == f"/api/v1/namespaces/team/pods/{pod.name}"


async def test_a_model_that_is_gone_is_planned_no_more(hands: Hands) -> None:
    hands.server.fail[("PATCH", f"{MODEL_PATH}/status")] = 404
    assert await hands.carry_out()
    assert hands.mirror.models == {}


async def test_an_edit_that_excludes_ours_has_the_object_made_anew_once(hands: Hands) -> None:
    await hands.carry_out()
    path = "/apis/policy/v1/namespaces/team/poddisruptionbudgets/npufleet-tiny"
    edited = hands.server.put(path, {**hands.server.objects[path], "spec": {"maxUnavailable": 1}})
    hands.mirror.upsert(kind_of({"kind": "PodDisruptionBudget"}), edited)
    hands.server.fail[("PATCH", path)] = 422
    await hands.carry_out(replace(hands.plan, creates=()))
    assert [write for write in hands.server.writes() if write[1] == path] == [("PATCH", path), ("DELETE", path), ("PATCH", path)]
    assert path not in hands.server.objects
    assert "told to fail" in hands.applier.refused[("team", "tiny")]
