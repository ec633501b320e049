"""What the pod's tests share: a tiny model on disk, and one server that runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pod_process import PodProcess, start_pod
from support.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def pod(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodProcess]:
    """A ready server of the tiny model, shared by all tests that leave it as it is."""
    with start_pod(tiny_model, tmp_path_factory.mktemp("pod"), aliases=["default/tiny"]) as process:
        process.wait_ready()
        yield process
