"""The benchmark runs as it is documented, beside a peer that is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_prints_every_figure(tmp_path: Path) -> None:
    go = shutil.which("go")
    assert go is not None
    command = [sys.executable, "-m", "benchmarks.gateway", "--json", "--seconds", "0.5", "--peers", "vllm-router"]
    environment = {"PATH": f"{Path(go).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["failed"] == 0, found["error"]
    assert found["peers"] == {"vllm-router": {"installed": False}}
    for name in ("requests_s", "chunks_s", "memory_kb_per_stream", "cpu_us_per_request", "cpu_us_per_chunk"):
        assert found[name] > 0, name
    assert set(found["added_ms"]) == {"p50", "p99"}


def test_an_unknown_peer_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks.gateway", "--peers", "nginx"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "nginx" in ended.stderr
