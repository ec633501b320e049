"""Nodes that two pools select: one owner, the same in whatever order, and both are told."""

from __future__ import annotations

from datetime import timedelta

import pytest

from npufleet_api.conditions import Reason
from npufleet_api.pool import NpuSelection
from npufleet_operator.core.observed import EPOCH, RivalPool
from support.fleet import RESOURCE, Fleet, is_quiet, model_spec, node


def rival(name: str, *, older: bool, **selection: object) -> RivalPool:
    """Another pool; the fleet's own was created at the epoch."""
    npus = NpuSelection.model_validate({"resourceName": RESOURCE, **selection})
    return RivalPool(name, EPOCH + timedelta(seconds=-1 if older else 1), npus)


def told(fleet: Fleet) -> tuple[str, str, str]:
    """The pool's condition NodesExclusive."""
    condition = fleet.pool_status.condition("NodesExclusive")
    assert condition is not None
    return condition.status.value, condition.reason, condition.message


def test_a_node_belongs_to_the_pool_that_was_created_first() -> None:
    fleet = Fleet(rivals=(rival("elder", older=True),))
    fleet.add_model("tiny", model_spec())
    assert is_quiet(fleet.step())
    assert (fleet.pool_status.nominal, fleet.condition("tiny", "CapacityAvailable")[1]) == (0, Reason.NO_NODES)
    assert told(fleet)[:2] == ("False", Reason.NODES_SHARED)
    assert "node-0 (to elder)" in told(fleet)[2]


def test_the_owner_keeps_its_node_and_is_told_too() -> None:
    fleet = Fleet(rivals=(rival("younger", older=False),))
    fleet.add_model("tiny", model_spec())
    fleet.settle()
    assert len(fleet.of("tiny")) == 1
    assert told(fleet)[:2] == ("False", Reason.NODES_SHARED)
    assert "node-0 (by younger)" in told(fleet)[2]


def test_pools_of_the_same_age_are_ordered_by_name() -> None:
    same = RivalPool("aaa", EPOCH, NpuSelection.model_validate({"resourceName": RESOURCE}))
    fleet = Fleet(rivals=(same,))
    fleet.step()
    assert fleet.pool_status.nominal == 0


@pytest.mark.parametrize("selection", [{"nodeSelector": {"chip": "910C"}}, {"resourceName": "huawei.com/Ascend310"}])
def test_pools_that_select_other_nodes_or_npus_are_no_rivals(selection: dict[str, object]) -> None:
    fleet = Fleet(nodes={"node-0": node("node-0")}, rivals=(rival("elder", older=True, **selection),))
    fleet.step()
    assert fleet.pool_status.nominal == 8
    assert told(fleet)[0] == "True"
