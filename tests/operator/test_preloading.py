"""A new revision's files are in the caches before a replica is replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npufleet_api.conditions import ModelCondition
from npufleet_api.model import AscendModelSpec
from npufleet_operator.core.actions import Plan
from npufleet_operator.core.objects.source import asked
from npufleet_operator.core.observed import JobState
from npufleet_operator.core.plan import make_plan
from npufleet_operator.shell.parse import job_state
from support.fleet import Fleet, model_spec, node, pool_spec

CACHE = {"cache": {"hostPath": "/var/lib/models"}}


def spec(revision: str, **changes: Any) -> AscendModelSpec:
    """A model of a hub."""
    return model_spec(model={"uri": "hf://org/tiny", "revision": revision}, **changes)


def fleet_with_a_new_revision(models: dict[str, Any] = CACHE, **changes: Any) -> Fleet:
    """Two replicas of one revision serve on two nodes, and another revision is asked for now."""
    fleet = Fleet(pool=pool_spec(models=models), nodes={name: node(name, 2) for name in ("node-0", "node-1")})
    fleet.add_model("a", spec("one", replicas=2, parallelism={"tensor": 1}))
    fleet.settle()
    uids = sorted(fleet.pods)
    for uid, place in zip(uids, ("node-0", "node-1"), strict=True):
        fleet.pods[uid] = replace(fleet.pods[uid], source_asked=asked(spec("one")), node=place)
    fleet.add_model("a", spec("two", **{"replicas": 2, **changes}))
    return fleet


def plan_with(fleet: Fleet, state: JobState | None) -> Plan:
    """The plan once all jobs are in `state`."""
    observed = fleet.observe()
    first = make_plan(observed, fleet.now)
    if state is None:
        return first
    names = [(m["metadata"]["namespace"], m["metadata"]["name"]) for m in jobs(first)]
    return make_plan(replace(observed, jobs=dict.fromkeys(names, state)), fleet.now)


def jobs(plan: Plan) -> list[Any]:
    """Jobs that the plan wants."""
    return [manifest for manifest in plan.objects if manifest["kind"] == "Job"]


def test_nothing_is_replaced_before_the_files_are_on_the_nodes() -> None:
    fleet = fleet_with_a_new_revision()
    for state in (None, JobState.RUNNING):
        plan = plan_with(fleet, state)
        places = [
            job["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ][0]["matchFields"][0]["values"]
            for job in jobs(plan)
        ]
        assert places == [["node-0"], ["node-1"]]
        assert not plan.creates
        assert not plan.drains
        condition = plan.model_status[("team", "a")].condition(ModelCondition.ROLLED_OUT)
        assert condition is not None
        assert (condition.reason, "2 cache(s)" in condition.message) == ("Preloading", True)


def test_the_rollout_goes_on_once_they_are_and_also_where_a_job_failed() -> None:
    for state in (JobState.COMPLETE, JobState.FAILED):
        plan = plan_with(fleet_with_a_new_revision(), state)
        assert plan.creates or plan.drains


def test_a_node_that_is_being_emptied_is_not_loaded() -> None:
    fleet = fleet_with_a_new_revision()
    fleet.nodes["node-0"] = replace(fleet.nodes["node-0"], schedulable=False)
    (job,) = jobs(plan_with(fleet, None))
    assert "node-1" in str(job)


@pytest.mark.parametrize("change", [{"files": ["*Q8*"]}, {"region": "eu"}, {"endpoint": "https://mirror.example"}])
def test_other_files_are_another_thing_to_ask_for(change: dict[str, Any]) -> None:
    model = {"uri": "s3://bucket/tiny", "files": ["*Q4*"]}
    assert asked(model_spec(model=model)) != asked(model_spec(model={**model, **change}))


def test_jobs_ask_for_no_npu_and_carry_no_label_of_a_replica() -> None:
    plan = plan_with(fleet_with_a_new_revision(), None)
    for job in jobs(plan):
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert set(template["metadata"]["labels"]) == {"app.kubernetes.io/component"}
        assert container["command"][-1] == "--only-cache"


def test_a_shared_volume_is_filled_once() -> None:
    plan = plan_with(fleet_with_a_new_revision({"cache": {"claimName": "models"}}), None)
    (job,) = jobs(plan)
    assert "affinity" not in job["spec"]["template"]["spec"]


def test_no_job_without_a_cache_with_preloading_off_or_for_the_same_files() -> None:
    for fleet in (
        fleet_with_a_new_revision({}),
        fleet_with_a_new_revision({**CACHE, "preload": {"mode": "Off"}}),
        fleet_with_a_new_revision(rollout="Recreate"),
    ):
        plan = plan_with(fleet, None)
        assert not jobs(plan)
        assert plan.creates or plan.drains
    fleet = fleet_with_a_new_revision()
    fleet.add_model("a", spec("one", replicas=2, engine={"maxNumSequences": 7}))
    assert not jobs(plan_with(fleet, None))


def test_a_job_is_judged_by_its_conditions() -> None:
    assert job_state({}) is JobState.RUNNING
    assert job_state({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}) is JobState.COMPLETE
    assert job_state({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}) is JobState.FAILED
