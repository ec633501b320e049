"""npufleet on the development cluster: installed once by its chart, a pool, and a namespace with a tiny model per test."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.install import NAMESPACE, ROOT, apply, install_chart
from devcluster import Cluster
from devcluster.testing import Kubectl
from npufleet_operator.core.naming import gateway_child
from support.team import Team, give_node_to, pool_manifest, settled
from support.tiny_model import write_tiny_model

POOL = "e2e"
RECORDED_MI = 16


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need the cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, readable by any user."""
    root = tmp_path_factory.mktemp("models")
    for folder in (root, root.parent, root.parent.parent):
        folder.chmod(0o755)
    folder = root / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The cluster with the chart installed, plans recorded, and its CRDs as they are now: Helm leaves those of an earlier installation as
    they were."""
    install_chart(cluster, {"operator": {"recordPlansMi": RECORDED_MI}})
    cluster.run_kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "charts" / "npufleet" / "crds"))
    return cluster


@pytest.fixture(scope="session")
def pool(installed: Cluster) -> Iterator[str]:
    """The pool that most tests share, with its gateway ready."""
    give_node_to(installed, POOL)
    apply(installed, [pool_manifest(POOL)])
    wait_gateway(installed, POOL)
    yield POOL
    installed.run_kubectl("delete", "npool", POOL, "--ignore-not-found")


def wait_gateway(cluster: Cluster, pool: str) -> None:
    """Until the pool's gateway has a ready replica."""
    settled(
        f"gateway of {pool}",
        lambda: cluster.run_kubectl("-n", NAMESPACE, "get", "deployment", gateway_child(pool), "-o", "jsonpath={.status.readyReplicas}"),
    )


@pytest.fixture
def team(pool: str, kubectl: Kubectl, tiny_folder: Path) -> Iterator[Team]:
    """A namespace with the claim `tiny`."""
    member = Team(kubectl, pool)
    member.add_volume("tiny", tiny_folder)
    yield member
    _leave(member)


@pytest.fixture(scope="session")
def served(pool: str, installed: Cluster, tiny_folder: Path) -> Iterator[Team]:
    """A model `tiny` that serves in a namespace that admits restricted pods only; for tests that leave it as they found it."""
    member = Team(Kubectl(installed, f"served-{uuid.uuid4().hex[:6]}"), pool)
    member.kubectl("create", "namespace", member.namespace)
    member.kubectl("label", "namespace", member.namespace, "pod-security.kubernetes.io/enforce=restricted")
    member.add_volume("tiny", tiny_folder)
    member.apply_model("tiny")
    member.wait_ready("tiny")
    member.wait_routed("tiny")
    yield member
    _leave(member)
    member.kubectl("delete", "namespace", member.namespace, "--wait=false")


@pytest.fixture
def own_pool(installed: Cluster, kubectl: Kubectl, tiny_folder: Path) -> Iterator[Callable[..., Team]]:
    """Makes a pool of the test's own, with a team in it."""
    made: list[Team] = []

    def make(**spec: object) -> Team:
        name = kubectl.namespace[-40:].strip("-")
        give_node_to(installed, name)
        apply(installed, [pool_manifest(name, **spec)])
        wait_gateway(installed, name)
        team = Team(kubectl, name)
        if not made:
            team.add_volume("tiny", tiny_folder)
        made.append(team)
        return team

    yield make
    for team in made:
        _leave(team)
        installed.run_kubectl("delete", "npool", team.pool, "--ignore-not-found")
    give_node_to(installed, POOL)


def _leave(team: Team) -> None:
    """Models first, so that the NPUs are free for the next test."""
    team.kubectl("delete", "ascendmodel", "--all", "--wait=true")
    team.kubectl("delete", "pods", "--all", "--grace-period=1", "--wait=true")
    team.kubectl("delete", "pvc", "--all", "--wait=false")
    for volume in team.kubectl.cluster.run_kubectl("get", "pv", "-o", "name").split():
        if volume.removeprefix("persistentvolume/").startswith(f"{team.namespace}-"):
            team.kubectl.cluster.run_kubectl("delete", volume, "--wait=false")
