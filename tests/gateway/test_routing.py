"""Names, ownership and states: which requests may reach which pods."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.routing import Model, Replica, ReplicaState, build_table

NAMES = st.sampled_from(["a", "b", "c"])
NAMESPACES = st.sampled_from(["x", "y"])


def model(name: str, namespace: str = "x", *, served: str | None = None, created: str = "2026-01-01T00:00:00Z", uid: str = "") -> Model:
    return Model(namespace, name, uid or f"uid-{namespace}-{name}", created, served or name, "chat")


def replica(name: str, owner: Model, state: ReplicaState = ReplicaState.READY, owner_uid: str | None = None) -> Replica:
    return Replica(owner.namespace, name, f"pod-{name}", owner.name, frozenset({owner_uid or owner.uid}), "10.0.0.1", state)


def test_a_model_is_found_by_served_name_and_by_namespace_and_name() -> None:
    table = build_table([model("a", served="gpt")], [])
    route = table.find("gpt")
    assert route is not None
    assert table.find("x/a") is route
    assert table.find("a") is None


def test_the_older_model_keeps_a_served_name_and_the_other_stays_reachable() -> None:
    younger = model("a", "x", served="gpt", created="2026-02-01T00:00:00Z")
    older = model("b", "y", served="gpt", created="2026-01-01T00:00:00Z")
    table = build_table([younger, older], [])
    assert [route.public_name for route in table.routes] == ["gpt", "x/a"]
    found = table.find("gpt")
    assert found is not None
    assert found.model == older
    other = table.find("x/a")
    assert other is not None
    assert other.model == younger


def test_models_of_one_age_are_ordered_by_namespace_and_name() -> None:
    table = build_table([model("b", served="gpt"), model("a", served="gpt")], [])
    assert [route.public_name for route in table.routes] == ["gpt", "x/b"]
    assert table.routes[0].model.name == "a"


def test_a_served_name_never_hides_another_models_namespace_and_name() -> None:
    thief = model("a", "y", served="x/b", created="2020-01-01T00:00:00Z")
    victim = model("b", "x")
    table = build_table([thief, victim], [])
    found = table.find("x/b")
    assert found is not None
    assert found.model == victim
    assert table.routes[0].public_name == "y/a"


def test_pods_of_a_former_model_of_the_same_name_do_not_count() -> None:
    owner = model("a")
    table = build_table([owner], [replica("old", owner, owner_uid="uid-of-before"), replica("new", owner)])
    assert [r.pod_name for r in table.routes[0].replicas] == ["new"]


def test_pods_without_their_model_are_not_routed() -> None:
    assert build_table([], [replica("r", model("a"))]).routes == ()


def test_only_ready_replicas_are_chosen_from_and_the_states_are_told() -> None:
    owner = model("a")
    replicas = [replica(state.value, owner, state) for state in ReplicaState]
    route = build_table([owner], replicas).routes[0]
    assert [r.pod_name for r in route.ready] == ["ready"]
    assert route.states() == "1 ready, 1 starting, 1 draining, 1 terminating, 1 ended"
    assert build_table([owner], []).routes[0].states() == "no replica exists"


@given(
    st.lists(
        st.builds(
            lambda name, namespace, served, age: model(name, namespace, served=served, created=f"2026-01-0{age}T00:00:00Z"),
            NAMES,
            NAMESPACES,
            st.one_of(NAMES, st.builds("{}/{}".format, NAMESPACES, NAMES)),
            st.integers(1, 3),
        ),
        unique_by=lambda m: m.key,
    ),
    st.randoms(),
)
def test_names_are_unique_complete_and_independent_of_order(models: list[Model], random: object) -> None:
    table = build_table(models, [])
    shuffled = list(models)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis' Random
    assert build_table(shuffled, []) == table
    assert len({route.public_name for route in table.routes}) == len(models)
    for one in models:
        qualified = table.find(one.qualified_name)
        assert qualified is not None
        assert qualified.model == one
        claimed = table.find(one.served_name)
        assert claimed is not None
        ages = [(m.created, m.namespace, m.name) for m in models if m.served_name == one.served_name]
        if one.served_name not in {m.qualified_name for m in models}:
            assert (claimed.model.created, claimed.model.namespace, claimed.model.name) == min(ages)
