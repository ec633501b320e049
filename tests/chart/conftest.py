"""Helm as the chart's tests use it: the version that tools/devcluster pins, built when this machine does not have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster import binaries, versions


@pytest.fixture(scope="session")
def helm_binary() -> Path:
    """Path of the Helm executable."""
    return binaries.ensure(versions.project("helm"), print)["helm"]
