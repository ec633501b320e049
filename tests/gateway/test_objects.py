"""AscendModels and Pods as the API server sends them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.support import POOL, model_object, pod_object
from npufleet_api.slo import SloTargets
from npufleet_gateway.errors import ObjectError
from npufleet_gateway.objects import UNCHANGED_LABEL, parse_model, parse_pod, pod_selector
from npufleet_gateway.routing import ReplicaState
from npufleet_operator.core.naming import slug

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def with_status(**status: Any) -> dict[str, Any]:
    pod = pod_object("r0")
    pod["status"] = {**pod["status"], **status}
    return pod


@pytest.mark.parametrize(
    ("pod", "state"),
    [
        (pod_object("r0"), ReplicaState.READY),
        (pod_object("r0", ready=False), ReplicaState.STARTING),
        (pod_object("r0", ip=None), ReplicaState.STARTING),
        (pod_object("r0", draining=True), ReplicaState.DRAINING),
        (pod_object("r0", deleting=True), ReplicaState.TERMINATING),
        (pod_object("r0", draining=True, deleting=True), ReplicaState.TERMINATING),
        (with_status(phase="Failed"), ReplicaState.ENDED),
        (with_status(containerStatuses=[]), ReplicaState.STARTING),
        (with_status(containerStatuses=[{"name": "monitor", "ready": True}]), ReplicaState.STARTING),
        (
            with_status(
                conditions=[{"type": "Ready", "status": "False"}],
                initContainerStatuses=[{"name": "monitor", "ready": False}],
            ),
            ReplicaState.READY,
        ),
    ],
)
def test_a_pods_state_follows_its_engine_container(pod: dict[str, Any], state: ReplicaState) -> None:
    replica = parse_pod(pod, POOL)
    assert replica is not None
    assert replica.state is state


def test_a_pod_without_a_model_or_of_another_pool_is_no_replica() -> None:
    gateway = pod_object("gateway")
    gateway["metadata"]["annotations"] = {}
    assert parse_pod(gateway, POOL) is None
    other = pod_object("r0")
    other["metadata"]["annotations"]["npufleet.dev/pool-name"] = "other"
    assert parse_pod(other, POOL) is None


def test_an_ipv6_address_is_bracketed_in_urls() -> None:
    replica = parse_pod(pod_object("r0", ip="fd00::1"), POOL)
    assert replica is not None
    assert replica.host == "[fd00::1]"


def test_a_model_has_its_name_as_served_name_and_the_targets_of_its_slo() -> None:
    model = parse_model(model_object("qwen", slo={"ttftMilliseconds": 800}), POOL)
    assert model is not None
    assert model.served_name == "qwen"
    assert model.slo == SloTargets(ttft_ms=800)


def test_models_of_other_pools_and_models_being_deleted_are_not_taken() -> None:
    deleted = model_object()
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert parse_model(deleted, POOL) is None
    assert parse_model(model_object(pool="other"), POOL) is None


def test_what_another_pools_model_looks_like_does_not_matter() -> None:
    broken = model_object(pool="other")
    broken["spec"]["workloadClass"] = 3
    assert parse_model(broken, POOL) is None


def test_an_unparsable_model_names_the_object_and_the_field() -> None:
    broken = model_object()
    broken["spec"]["scaling"] = {"minReplicas": -1}
    with pytest.raises(ObjectError, match=r"AscendModel team-a/chat: scaling.minReplicas"):
        parse_model(broken, POOL)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status", "kind"]), JSON))
def test_any_json_object_is_parsed_left_out_or_refused(raw: dict[str, Any]) -> None:
    for parse in (parse_model, parse_pod):
        with contextlib.suppress(ObjectError):
            parse(raw, POOL)


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,60}[a-z0-9])?", fullmatch=True))
def test_the_selector_names_the_label_that_the_operator_sets(pool: str) -> None:
    selector = pod_selector(pool)
    assert selector.startswith("app.kubernetes.io/managed-by=npufleet-operator,npufleet.dev/pool")
    assert UNCHANGED_LABEL.fullmatch(pool) is None or slug(pool) == pool
    assert selector.endswith(f"={pool}") is (UNCHANGED_LABEL.fullmatch(pool) is not None)
