"""pytest fixtures on a real cluster: load with `-p devcluster.pytest_plugin`.

- `cluster` (session): brought up when it is not; ended after the run unless it was up before or DEVCLUSTER_KEEP=1.
  DEVCLUSTER_NAME chooses it, by default `test`.
- `namespace`: a namespace of the test's own, deleted after it; a failed test prints its pods, events and logs.
- `kubectl`: kubectl in that namespace, with helpers that wait.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Generator, Iterator

import pytest

import devcluster
from devcluster.lifecycle import is_running
from devcluster.paths import Layout
from devcluster.testing import Kubectl

_FIRST_TEST_SECONDS = 1800  # the first use may have to build Kubernetes
_NAMESPACE_KEY = pytest.StashKey[Kubectl]()


def _keeps() -> bool:
    return os.environ.get("DEVCLUSTER_KEEP", "") not in ("", "0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[devcluster.Cluster]:
    """The cluster that tests share."""
    name = os.environ.get("DEVCLUSTER_NAME", "test")
    was_up = is_running(Layout.of(name))
    handle = devcluster.up(name)
    handle.npu_reset()
    yield handle
    if not was_up and not _keeps():
        devcluster.down(name)


@pytest.fixture
def kubectl(cluster: devcluster.Cluster, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a new namespace that belongs to this test."""
    readable = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    client = Kubectl(cluster, f"{readable}-{uuid.uuid4().hex[:6]}")
    client("create", "namespace", client.namespace)
    request.node.stash[_NAMESPACE_KEY] = client
    # Pods are refused until the controller manager has made it.
    client.wait("the service account", lambda: client("get", "serviceaccount", "default", "-o", "name"))
    yield client
    client("delete", "namespace", client.namespace, "--wait=false")


@pytest.fixture
def namespace(kubectl: Kubectl) -> str:
    """The name of the test's own namespace."""
    return kubectl.namespace


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what happened in the test's namespace to the report of a failed test."""
    report = yield
    client = item.stash.get(_NAMESPACE_KEY, None)
    if report.failed and client is not None:
        report.sections.append((f"namespace {client.namespace}", client.diagnosis()))
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the first test that needs the cluster the time to bring it up."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_FIRST_TEST_SECONDS))
            return
