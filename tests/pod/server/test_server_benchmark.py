"""The benchmark of the server measures what it says: its figures are there, and as many tokens as were made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_tells_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks.server", "--streams", "2", "--seconds", "0.2", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)["empty_engine"]
    assert figures["tokens"] == 2 * 64
    assert 0 < figures["wire_ms"]["p50"] <= figures["wire_ms"]["p99"]
    assert figures["requests_s"] > 0
