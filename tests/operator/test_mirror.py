"""The mirror: newer versions win, changes wake who reads them, and what planning does not read wakes nobody."""

from __future__ import annotations

from typing import Any

import pytest

from npufleet_api import API_VERSION, MODEL_KIND
from npufleet_operator.shell.kinds import CHILDREN, DEPLOYMENT, MODEL, NODE, POD, POOL
from npufleet_operator.shell.mirror import ALL_POOLS, Mirror

SERVICE = next(kind for kind in CHILDREN if kind.kind == "Service")


def pool(version: int = 1, name: str = "prod", **spec: Any) -> dict[str, Any]:
    base = {"npus": {"resourceName": "huawei.com/Ascend910"}, "classes": [{"name": "chat"}]}
    return {"metadata": {"name": name, "uid": f"pool-{name}", "resourceVersion": str(version), "generation": 1}, "spec": {**base, **spec}}


def model(version: int = 1, uid: str = "m1", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "tiny", "namespace": "team", "uid": uid, "resourceVersion": str(version), "generation": 1},
        "spec": {"poolRef": {"name": "prod"}, "workloadClass": "chat", "model": {"uri": "pvc://x"}},
        "status": status,
    }


def pod(version: int = 1, owner: str = "m1", ready: bool = False, **metadata: Any) -> dict[str, Any]:
    owners = [{"apiVersion": API_VERSION, "kind": MODEL_KIND, "name": "tiny", "uid": owner}] if owner else []
    return {
        "metadata": {"name": "p", "namespace": "team", "uid": "p1", "resourceVersion": str(version), "ownerReferences": owners, **metadata},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"huawei.com/Ascend910": "1"}}}]},
        "status": {"containerStatuses": [{"name": "engine", "ready": ready}]},
    }


class Woken:
    """Collects which pools were woken."""

    def __init__(self, mirror: Mirror) -> None:
        self.pools: list[str] = []
        mirror.subscribe(self.pools.append)

    def take(self) -> list[str]:
        taken, self.pools[:] = list(self.pools), []
        return sorted(taken)


@pytest.fixture
def mirror() -> Mirror:
    found = Mirror()
    found.upsert(POOL, pool())
    found.upsert(MODEL, model())
    return found


def test_an_older_event_does_not_undo_what_a_write_returned(mirror: Mirror) -> None:
    mirror.upsert(POD, pod(version=9, ready=True))
    assert not mirror.upsert(POD, pod(version=5, ready=False))
    assert mirror.pods[("team", "p")].engine_ready


def test_a_late_event_of_a_deleted_namesake_is_ignored(mirror: Mirror) -> None:
    mirror.upsert(POD, pod(version=9))
    mirror.remove(POD, pod(version=9, uid="other"))
    assert ("team", "p") in mirror.pods
    mirror.remove(POD, pod(version=10))
    assert ("team", "p") not in mirror.pods


def test_a_recreated_object_replaces_its_namesake(mirror: Mirror) -> None:
    mirror.upsert(MODEL, model(version=4, uid="m2"))
    assert mirror.models[("team", "tiny")].uid == "m2"
    assert not mirror.upsert(MODEL, model(version=3, uid="m1"))
    assert mirror.models[("team", "tiny")].uid == "m2"


def test_our_own_status_writes_wake_nobody(mirror: Mirror) -> None:
    woken = Woken(mirror)
    mirror.upsert(MODEL, model(version=2, replicas=1))
    mirror.upsert(POOL, {**pool(version=2), "status": {"nominal": 8}})
    assert woken.take() == []
    assert mirror.models[("team", "tiny")].status.replicas == 1


def test_changes_wake_the_pools_that_read_them(mirror: Mirror) -> None:
    woken = Woken(mirror)
    mirror.upsert(POD, pod(version=2))
    assert woken.take() == ["prod"]
    mirror.upsert(POD, pod(version=3))
    assert woken.take() == [], "nothing that planning reads has changed"
    mirror.upsert(POD, pod(version=4, owner="", name="stranger", uid="s1"))
    assert woken.take() == ["prod"], "a foreign pod takes from the pool's resource"
    capacity = {"huawei.com/Ascend910": "8"}
    node: dict[str, Any] = {"metadata": {"name": "n", "uid": "n1", "resourceVersion": "5"}, "status": {"capacity": capacity}}
    mirror.upsert(NODE, node)
    assert woken.take() == [ALL_POOLS]
    mirror.upsert(NODE, {**node, "metadata": {**node["metadata"], "resourceVersion": "6"}})
    assert woken.take() == [], "a heartbeat is no news"
    child = {"metadata": {"name": "s", "namespace": "team", "uid": "s", "resourceVersion": "7", "ownerReferences": [{"uid": "m1"}]}}
    mirror.upsert(SERVICE, child)
    assert woken.take() == ["prod"]
    gateway = {
        "metadata": {"name": "g", "namespace": "sys", "uid": "g", "resourceVersion": "8", "annotations": {"npufleet.dev/pool-name": "prod"}}
    }
    mirror.upsert(DEPLOYMENT, gateway)
    assert woken.take() == ["prod"]
    mirror.remove(DEPLOYMENT, gateway)
    assert woken.take() == ["prod"]


def test_a_model_that_moves_wakes_both_pools(mirror: Mirror) -> None:
    woken = Woken(mirror)
    moved = model(version=5)
    moved["spec"]["poolRef"] = {"name": "other"}
    mirror.upsert(MODEL, moved)
    assert woken.take() == ["other", "prod"]


def test_pods_that_hold_nothing_are_not_kept(mirror: Mirror) -> None:
    plain = {"metadata": {"name": "web", "namespace": "team", "uid": "w", "resourceVersion": "3"}, "spec": {"containers": [{"name": "c"}]}}
    mirror.upsert(POD, plain)
    assert mirror.pods == {}


def test_what_was_deleted_is_not_brought_back_by_a_late_answer_or_an_old_list(mirror: Mirror) -> None:
    mirror.remove(MODEL, model(version=7))
    assert not mirror.upsert(MODEL, model(version=6))
    assert mirror.models == {}
    assert mirror.upsert(MODEL, model(version=8, uid="another"))
    assert ("team", "tiny") in mirror.models


def test_what_is_forgotten_unseen_is_not_brought_back_by_the_state_it_was_known_in(mirror: Mirror) -> None:
    mirror.forget(MODEL, (MODEL_KIND, "team", "tiny"))
    assert not mirror.upsert(MODEL, model(version=1))


def test_an_object_that_had_only_left_the_selector_comes_back(mirror: Mirror) -> None:
    mirror.upsert(POD, pod(version=3))
    mirror.remove(POD, pod(version=4))
    assert mirror.upsert(POD, pod(version=5))
    assert ("team", "p") in mirror.pods
