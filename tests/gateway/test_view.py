"""The view as a reducer: whatever order events come in, it equals what the API server holds."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.support import POOL, model_object, pod_object
from npufleet_gateway.routing import RoutingTable
from npufleet_gateway.view import ClusterView


def view_of(models: list[dict[str, Any]], pods: list[dict[str, Any]]) -> ClusterView:
    view = ClusterView(POOL)
    view.models.replace(models)
    view.pods.replace(pods)
    return view


def ready_pods(view: ClusterView, name: str = "chat") -> list[str]:
    route = view.table.find(name)
    return [replica.pod_name for replica in route.ready] if route else []


def test_nothing_is_routed_before_both_kinds_were_listed() -> None:
    view = ClusterView(POOL)
    view.models.replace([model_object()])
    assert not view.synced
    assert view.table == RoutingTable()
    view.pods.replace([pod_object("r0")])
    assert view.synced
    assert ready_pods(view) == ["r0"]


def test_events_add_change_and_remove() -> None:
    view = view_of([model_object()], [pod_object("r0")])
    view.pods.apply("ADDED", pod_object("r1"))
    assert ready_pods(view) == ["r0", "r1"]
    view.pods.apply("MODIFIED", pod_object("r0", draining=True))
    assert ready_pods(view) == ["r1"]
    view.pods.apply("MODIFIED", pod_object("r0"))
    assert ready_pods(view) == ["r0", "r1"]
    view.pods.apply("DELETED", pod_object("r1"))
    assert ready_pods(view) == ["r0"]
    view.models.apply("DELETED", model_object())
    assert view.table.routes == ()


def test_a_model_that_moves_to_another_pool_leaves() -> None:
    view = view_of([model_object()], [pod_object("r0")])
    view.models.apply("MODIFIED", model_object(pool="other"))
    assert view.table.routes == ()


def test_a_list_removes_what_it_does_not_hold() -> None:
    view = view_of([model_object()], [pod_object("r0"), pod_object("r1")])
    view.pods.replace([pod_object("r1")])
    assert ready_pods(view) == ["r1"]


def test_an_unparsable_change_is_counted_and_the_last_good_form_serves_on() -> None:
    broken = model_object()
    broken["spec"]["workloadClass"] = None
    view = view_of([model_object()], [pod_object("r0")])
    for update in (partial(view.models.apply, "MODIFIED", broken), partial(view.models.replace, [broken])):
        update()
        assert view.models.unparsable == 1
        assert ready_pods(view) == ["r0"]
    view.models.apply("MODIFIED", model_object())
    assert view.models.unparsable == 0


def test_an_unparsable_object_that_is_new_is_left_out_and_counted() -> None:
    broken = model_object(uid="uid-new")
    broken["spec"]["workloadClass"] = None
    view = view_of([model_object(), broken], [])
    assert view.models.unparsable == 1
    view = view_of([model_object(uid="uid-old")], [])
    view.models.apply("ADDED", broken)
    assert view.table.routes == ()


def test_objects_without_a_name_are_ignored() -> None:
    view = view_of([{}, {"metadata": 3}, {"metadata": {"name": "x"}}], [])
    view.models.apply("DELETED", {})
    view.models.apply("ADDED", {"metadata": []})
    assert view.table.routes == ()


def test_listeners_hear_each_new_table_before_it_is_used() -> None:
    view = ClusterView(POOL)
    heard: list[RoutingTable] = []
    view.on_table(heard.append)
    view.models.replace([model_object()])
    view.pods.replace([])
    assert view.table is heard[-1]
    assert view.table is view.table
    assert len(heard) == 1


def test_events_that_change_nothing_for_routing_do_not_rebuild_the_table() -> None:
    view = view_of([model_object()], [pod_object("r0")])
    before = view.table
    touched = pod_object("r0")
    touched["metadata"]["annotations"]["note"] = "x"
    view.pods.apply("MODIFIED", touched)
    view.pods.apply("DELETED", pod_object("unknown"))
    assert view.table is before


OBJECTS = st.builds(
    lambda name, ready, draining, deleting, uid: pod_object(name, ready=ready, draining=draining, deleting=deleting, uid=uid),
    st.sampled_from(["r0", "r1", "r2"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["pod-1", "pod-2"]),
)


@given(st.lists(st.tuples(st.sampled_from(["ADDED", "MODIFIED", "DELETED", "LIST"]), OBJECTS), max_size=20))
def test_after_any_events_the_table_equals_one_from_a_fresh_list(events: list[tuple[str, dict[str, Any]]]) -> None:
    view = view_of([model_object()], [])
    truth: dict[str, dict[str, Any]] = {}
    for event, pod in events:
        name = pod["metadata"]["name"]
        if event == "LIST":
            truth = {name: pod}
            view.pods.replace([pod])
        elif event == "DELETED":
            truth.pop(name, None)
            view.pods.apply(event, pod)
        else:
            truth[name] = pod
            view.pods.apply(event, pod)
        assert view.table == view_of([model_object()], list(truth.values())).table
        statuses = {name: pod for name, pod in truth.items() if pod["status"]["containerStatuses"][0]["ready"]}
        wanted = [
            name
            for name, pod in sorted(statuses.items())
            if "deletionTimestamp" not in pod["metadata"] and "npufleet.dev/drain-started" not in pod["metadata"]["annotations"]
        ]
        assert ready_pods(view) == wanted
