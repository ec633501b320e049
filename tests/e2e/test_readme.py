"""The README, as a new user follows it: every command, in order, in one shell. The demo and SmolLM2 are among them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.commands import ROOT, blocks

SESSION_SECONDS = 1500


@pytest.fixture
def own_state(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A state folder of the test's own: a demo that its user has running is let be. The cluster goes, whatever happens."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    environment.pop("KUBECONFIG", None)
    yield environment
    subprocess.run(["make", "demo-down"], cwd=ROOT, env=environment, check=True, capture_output=True)


@pytest.mark.timeout(SESSION_SECONDS + 60)
def test_every_command_of_the_readme_runs(own_state: dict[str, str]) -> None:
    commands = [command for block in blocks(ROOT / "README.md") if not block.needs for command in block.commands]
    assert "make demo" in commands
    script = "set -euo pipefail\n" + "\n".join(f"echo {index} >&2\n{command}" for index, command in enumerate(commands))
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=own_state, capture_output=True, text=True, timeout=SESSION_SECONDS, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.count("Paris") >= 2, "by the demo, and by curl through the gateway"
    assert "inferencepool.npufleet.dev/demo" in done.stdout
    assert "the pool has no NPUs" in done.stdout, "the honest condition of examples/qwen72b.yaml"
    assert "the demo's cluster is gone" in done.stdout
