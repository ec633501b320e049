"""Objects at the border: whatever the API server holds becomes a view, and never an error."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from npufleet_operator.core.observed import PodView
from npufleet_operator.shell.parse import model_view, node_view, pod_requests, pod_view, pool_view

META = {"name": "x", "namespace": "team", "uid": "u1", "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}


def pod(**status: Any) -> PodView:
    return pod_view({"metadata": META, "spec": {"containers": [{"name": "engine"}]}, "status": status})


def test_a_spec_that_does_not_parse_names_field_and_value() -> None:
    view = model_view({"metadata": META, "spec": {"poolRef": {"name": "prod"}, "workloadClass": "UPPER", "model": {"uri": "pvc://x"}}})
    assert view.spec is None
    assert view.pool_name == "prod"
    assert "spec.workloadClass" in view.spec_error
    assert "UPPER" in view.spec_error
    pool = pool_view({"metadata": {"name": "p", "uid": "u"}, "spec": {"npus": {"resourceName": "a/b"}, "classes": []}})
    assert pool.spec is None
    assert "spec.classes" in pool.spec_error


def test_a_status_written_by_someone_else_counts_as_none() -> None:
    view = model_view({"metadata": META, "spec": {}, "status": {"replicas": "many"}})
    assert view.status.replicas == 0


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (
            {"containerStatuses": [{"name": "engine", "ready": True, "state": {"running": {}}}]},
            {"engine_ready": True, "engine_started": True},
        ),
        ({"containerStatuses": [{"name": "monitor", "ready": True, "state": {"running": {}}}]}, {"engine_ready": False}),
        (
            {"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            {"waiting_reason": "ImagePullBackOff", "waiting_message": "no such image"},
        ),
        (
            {
                "containerStatuses": [
                    {
                        "name": "engine",
                        "restartCount": 3,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"message": "modelPath: empty"}},
                    }
                ]
            },
            {"terminated_message": "modelPath: empty", "engine_restarts": 3, "engine_started": False},
        ),
        (
            {
                "initContainerStatuses": [{"name": "monitor", "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}],
                "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            {"waiting_reason": "ErrImagePull"},
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]},
            {"scheduling_message": "0/1 nodes", "node": ""},
        ),
    ],
)
def test_container_states_become_what_planning_reads(status: dict[str, Any], expected: dict[str, Any]) -> None:
    view = pod(**status)
    assert {name: getattr(view, name) for name in expected} == expected


def test_a_pod_of_another_owner_kind_is_foreign() -> None:
    owned = {**META, "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r1"}]}
    assert pod_view({"metadata": owned, "spec": {}}).owner_name == ""


def test_requests_of_sidecars_and_init_containers_count_as_the_scheduler_counts_them() -> None:
    def container(count: int, **more: str) -> dict[str, Any]:
        return {"resources": {"limits": {"huawei.com/Ascend910": str(count), "cpu": "1"}}, **more}

    spec = {"containers": [container(2), container(1)], "initContainers": [container(1, restartPolicy="Always"), container(5)]}
    assert pod_requests(spec) == {"huawei.com/Ascend910": 9}
    assert pod_requests({"containers": [container(2)], "initContainers": [container(1)]}) == {"huawei.com/Ascend910": 3}


def test_a_node_keeps_extended_resources_only() -> None:
    view = node_view(
        {
            "metadata": {"name": "n"},
            "spec": {"unschedulable": True},
            "status": {
                "capacity": {"cpu": "4", "huawei.com/Ascend910": "8", "broken.io/x": "1.5"},
                "allocatable": {"huawei.com/Ascend910": "7"},
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
    )
    assert (view.ready, view.schedulable) == (True, False)
    assert view.capacity == {"huawei.com/Ascend910": 8}
    assert view.allocatable == {"huawei.com/Ascend910": 7}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=8), c, max_size=3),
)


@given(json_values)
def test_any_spec_and_status_of_a_model_parse_or_are_refused(value: Any) -> None:
    spec = value if isinstance(value, dict) else {"poolRef": {"name": "p"}, "workloadClass": value}
    status = value if isinstance(value, dict) else {}
    view = model_view({"metadata": META, "spec": spec, "status": status})
    assert (view.spec is None) == bool(view.spec_error)
