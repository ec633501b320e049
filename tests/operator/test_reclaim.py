"""Guarantees between classes: what is taken back, from whom, in which order, and what is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from npufleet_api.conditions import Reason
from npufleet_api.pool import InferencePoolSpec
from npufleet_operator.core.actions import Plan
from support.fleet import DRAIN_SECONDS, RESOURCE, Fleet, is_quiet, model_spec, node, pool_spec


def pool(*classes: tuple[str, int, int, int], **changes: Any) -> InferencePoolSpec:
    """Classes as name, priority, minPercent and maxPercent."""
    listed = [{"name": name, "priority": p, "minPercent": low, "maxPercent": high} for name, p, low, high in classes]
    return pool_spec(classes=listed, **changes)


def lent(npus: int = 8, **models: Any) -> Fleet:
    """A pool where `code` has borrowed everything: chat and document are guaranteed half of it."""
    fleet = Fleet(
        nodes={"node-0": node("node-0", npus)},
        pool=pool(("chat", 3, 25, 100), ("document", 2, 25, 100), ("code", 1, 25, 100)),
    )
    fleet.add_model("borrower", model_spec("code", npus, **models))
    fleet.settle()
    assert fleet.charged("code") == npus
    return fleet


def reclaimed(plan: Plan) -> list[str]:
    """Names of pods that a plan takes back."""
    return [d.pod.name for d in plan.drains if d.reason is Reason.RECLAIMED_FOR_GUARANTEE and d.pod.drain_started is None]


def guarantees(fleet: Fleet) -> tuple[str, str, str]:
    """Status, reason and message of the pool's condition GuaranteesMet."""
    condition = fleet.pool_status.condition("GuaranteesMet")
    assert condition is not None
    return condition.status.value, condition.reason, condition.message


def test_a_class_gets_its_guarantee_by_taking_back_what_another_borrowed() -> None:
    fleet = lent()
    fleet.add_model("talker", model_spec("chat", 2))
    plan = fleet.step()
    assert len(reclaimed(plan)) == 1, "one move in flight per claimant"
    assert next(c.reason for c in plan.choices if c.model == ("team", "borrower")) == Reason.RECLAIMED_FOR_GUARANTEE
    assert "team/talker" in plan.choices[0].message
    assert guarantees(fleet)[:2] == ("False", Reason.GUARANTEE_WAITING)
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (2, 6)
    assert guarantees(fleet)[0] == "True"


def test_beyond_the_guarantee_nothing_is_taken_back() -> None:
    fleet = lent()
    fleet.add_model("talker", model_spec("chat", 5))
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (2, 6)


def test_a_guarantee_that_is_used_is_never_taken() -> None:
    fleet = lent()
    fleet.add_model("talker", model_spec("chat", 8))
    fleet.add_model("writer", model_spec("document", 8))
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("document"), fleet.charged("code")) == (2, 2, 4)


def test_what_a_lower_priority_uses_of_its_guarantee_is_safe_from_higher_ones() -> None:
    fleet = Fleet(pool=pool(("chat", 3, 25, 100), ("document", 2, 25, 100), ("code", 1, 25, 100)))
    fleet.add_model("coder", model_spec("code", 2))
    fleet.add_model("talker", model_spec("chat", 6))
    fleet.settle()
    fleet.add_model("writer", model_spec("document", 2))
    fleet.settle()
    assert {name: fleet.charged(name) for name in ("chat", "document", "code")} == {"chat": 4, "document": 2, "code": 2}


def test_of_unequal_replicas_those_are_kept_that_fill_the_guarantee() -> None:
    fleet = Fleet(pool=pool(("chat", 3, 25, 100), ("code", 1, 50, 100)))
    fleet.add_model("large", model_spec("code", 1, parallelism={"tensor": 4}))
    fleet.add_model("small", model_spec("code", 4))
    fleet.settle()
    assert fleet.charged("code") == 8
    fleet.add_model("talker", model_spec("chat", 2))
    fleet.settle()
    assert (len(fleet.of("large")), len(fleet.of("small")), fleet.charged("chat")) == (1, 2, 2)


def test_no_second_victim_is_taken_while_the_first_still_drains() -> None:
    fleet = lent()
    fleet.busy = {pod.uid for pod in fleet.of("borrower")}
    fleet.add_model("talker", model_spec("chat", 1))
    assert len(reclaimed(fleet.step())) == 1
    for _ in range(DRAIN_SECONDS - 2):
        assert not reclaimed(fleet.step())
        assert guarantees(fleet)[1] == Reason.GUARANTEE_WAITING
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (1, 7)


def test_an_operator_that_restarts_in_mid_reclaim_ends_in_the_same_state() -> None:
    fleet = lent()
    fleet.busy = {pod.uid for pod in fleet.of("borrower")}
    fleet.add_model("talker", model_spec("chat", 1))
    fleet.step()
    for key, model in fleet.models.items():
        fleet.models[key] = replace(model, status=type(model.status)())
    fleet.pool_status = type(fleet.pool_status)()
    assert not reclaimed(fleet.step()), "the drain that has begun is known by its pod"
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (1, 7)


def test_nothing_is_taken_back_where_the_pool_forbids_it() -> None:
    fleet = lent()
    fleet.pool = pool(("chat", 3, 25, 100), ("code", 1, 25, 100), rebalancing={"drainSeconds": DRAIN_SECONDS, "reclaim": "Never"})
    fleet.add_model("talker", model_spec("chat", 1))
    assert is_quiet(fleet.step())
    assert guarantees(fleet)[:2] == ("False", Reason.GUARANTEE_WAITING)
    assert "reclaim" in guarantees(fleet)[2]


def test_victims_are_borrowers_of_the_lowest_priority_then_the_least_loaded_then_the_newest() -> None:
    fleet = Fleet(pool=pool(("chat", 3, 25, 100), ("document", 2, 25, 100), ("code", 1, 25, 100)))
    fleet.add_model("writer", model_spec("document", 4))
    fleet.add_model("coder", model_spec("code", 4))
    fleet.settle()
    fleet.add_model("talker", model_spec("chat", 2))
    newest = fleet.of("coder")[1]
    fleet.pods[newest.uid] = replace(newest, created=fleet.now)
    assert reclaimed(fleet.step()) == [newest.name]
    fleet.settle()
    assert {name: fleet.charged(name) for name in ("chat", "document", "code")} == {"chat": 2, "document": 4, "code": 2}


def test_nothing_is_taken_back_when_the_claimant_would_still_not_fit_on_a_node() -> None:
    fleet = Fleet(
        nodes={f"node-{i}": node(f"node-{i}", 3) for i in range(4)},
        pool=pool(("chat", 3, 50, 100), ("code", 1, 0, 100)),
    )
    fleet.add_model("borrower", model_spec("code", 12))
    fleet.settle()
    fleet.add_model("large", model_spec("chat", 1, parallelism={"tensor": 4}))
    assert is_quiet(fleet.step())
    assert guarantees(fleet)[:2] == ("False", Reason.GUARANTEE_FRAGMENTED)
    assert fleet.condition("large", "CapacityAvailable")[1] == Reason.NO_CAPACITY


def test_only_as_many_victims_go_as_the_claimant_needs_on_one_node() -> None:
    fleet = Fleet(
        nodes={"node-0": node("node-0", 4), "node-1": node("node-1", 4)},
        pool=pool(("chat", 3, 50, 100), ("code", 1, 0, 100)),
    )
    fleet.add_model("borrower", model_spec("code", 8))
    fleet.settle()
    fleet.add_model("pair", model_spec("chat", 1, parallelism={"tensor": 2}))
    plan = fleet.step()
    victims = [d.pod for d in plan.drains]
    assert len(victims) == 2
    assert len({pod.node for pod in victims}) == 1
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (2, 6)


def test_victims_on_other_nodes_are_spared_once_one_node_has_enough() -> None:
    fleet = Fleet(
        nodes={"node-0": node("node-0", 2), "node-1": node("node-1", 4)},
        pool=pool(("chat", 3, 50, 100), ("code", 1, 0, 100)),
    )
    fleet.add_model("borrower", model_spec("code", 6))
    fleet.settle()
    for index, pod in enumerate(sorted(fleet.of("borrower"), key=lambda p: (p.node, p.name))):
        fleet.pods[pod.uid] = replace(pod, created=fleet.now - timedelta(seconds=index))
    fleet.add_model("large", model_spec("chat", 1, parallelism={"tensor": 3}))
    victims = [drain.pod for drain in fleet.step().drains]
    assert [pod.node for pod in victims] == ["node-1"] * 3, "the newest are on node-0, and would not help"


def test_what_frees_up_for_a_claimant_is_not_lent_on() -> None:
    fleet = Fleet(nodes={"node-0": node("node-0", 4)}, pool=pool(("chat", 3, 50, 100), ("code", 1, 0, 100)))
    fleet.add_model("borrower", model_spec("code", 4))
    fleet.settle()
    fleet.add_model("pair", model_spec("chat", 1, parallelism={"tensor": 2}))
    fleet.add_model("eager", model_spec("code", 4))
    fleet.busy = {fleet.of("borrower")[0].uid}
    seen = set()
    for _ in range(DRAIN_SECONDS - 5):
        fleet.step()
        seen.add(fleet.charged("code"))
    assert seen == {4, 3}, "one NPU is free, and kept until the second is"
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (2, 2)


def test_what_is_kept_for_a_claimant_on_a_node_is_not_lent_while_another_node_has_room() -> None:
    fleet = Fleet(nodes={"a": node("a", 4)}, pool=pool(("chat", 3, 40, 100), ("code", 1, 0, 100)))
    fleet.nodes["c"] = node("c", 4)
    fleet.add_model("borrower", model_spec("code", 8))
    fleet.settle()
    fleet.add_model("pair", model_spec("chat", 1, parallelism={"tensor": 2}))
    victims = [drain.pod for drain in fleet.plan().drains]
    fleet.busy = {victims[0].uid}
    for _ in range(5):
        fleet.step()
    fleet.nodes["d"] = node("d", 1)
    plan = fleet.step()
    assert [fleet.preferred[pod.uid] for pod in fleet.of("borrower") if pod.created == fleet.now - timedelta(seconds=1)] == ["d"]
    assert len(plan.creates) == 1
    fleet.settle()
    assert fleet.charged("chat") == 2


def test_borrower_and_lender_do_not_evict_each_other_in_turn() -> None:
    fleet = lent()
    fleet.add_model("talker", model_spec("chat", 8))
    fleet.settle()
    for _ in range(30):
        assert is_quiet(fleet.step())


def test_a_reclaim_that_nobody_claims_any_more_is_taken_back() -> None:
    fleet = lent()
    fleet.busy = {pod.uid for pod in fleet.of("borrower")}
    fleet.add_model("talker", model_spec("chat", 1))
    fleet.step()
    del fleet.models[("team", "talker")]
    plan = fleet.step()
    assert [c.pod.name for c in plan.cancels]
    assert [c.reason for c in plan.choices] == [Reason.DRAIN_CANCELLED]
    fleet.settle()
    assert fleet.charged("code") == 8


def test_guarantees_shrink_by_priority_when_failed_cards_leave_too_few() -> None:
    fleet = Fleet(pool=pool(("chat", 3, 50, 100), ("code", 1, 50, 100)))
    fleet.nodes["node-0"] = node("node-0", 8, allocatable={RESOURCE: 5})
    fleet.add_model("talker", model_spec("chat", 8))
    fleet.add_model("coder", model_spec("code", 8))
    fleet.settle()
    assert (fleet.charged("chat"), fleet.charged("code")) == (4, 1)
    status, reason, message = guarantees(fleet)
    assert (status, reason) == ("False", Reason.GUARANTEES_EXCEED_SUPPLY)
    assert "code 1 of 4" in message
    assert {c.name: c.guaranteed for c in fleet.pool_status.classes} == {"chat": 4, "code": 1}


@pytest.mark.parametrize("percent", [5, 12])
def test_a_guarantee_that_holds_no_replica_is_told(percent: int) -> None:
    fleet = Fleet(pool=pool(("chat", 3, percent * 2, 100)))
    fleet.add_model("large", model_spec("chat", 1, parallelism={"tensor": 4}))
    fleet.settle()
    status, reason, message = guarantees(fleet)
    assert (status, reason) == (("False", Reason.GUARANTEE_BELOW_REPLICA) if percent > 6 else ("True", Reason.AS_EXPECTED))
    assert ("team/large" in message) is (percent > 6)


def test_the_ledger_tells_what_is_lent_borrowed_and_wanted() -> None:
    fleet = lent()
    rows = {c.name: c for c in fleet.pool_status.classes}
    assert (rows["code"].used, rows["code"].borrowed, rows["code"].wanted) == (8, 6, 8)
    assert (rows["chat"].lent, rows["document"].lent, rows["code"].lent) == (2, 2, 0)


def test_a_replica_that_never_served_is_taken_back_at_once() -> None:
    fleet = lent()
    pods = fleet.of("borrower")
    fleet.pods[pods[3].uid] = replace(pods[3], engine_ready=False, engine_started=False)
    fleet.auto_ready = False
    fleet.add_model("talker", model_spec("chat", 1))
    plan = fleet.step()
    assert [(d.pod.uid, d.reason) for d in plan.deletes] == [(pods[3].uid, Reason.RECLAIMED_FOR_GUARANTEE)]
    assert not plan.drains
