"""The benchmark of routing by prefix: what it prints, on any trace of its format, and that locality pays in it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are run from the repository and not installed

from benchmarks.prefix_routing import measure  # noqa: E402 - after the path
from benchmarks.traces import TraceRequest  # noqa: E402


def conversations(count: int) -> list[TraceRequest]:
    """Conversations of up to eight turns behind a common first block, a minute between two turns."""
    draw = random.Random(7)  # noqa: S311  # not for secrets
    found: list[TraceRequest] = []
    block = 1
    for _ in range(count):
        now, ids = draw.uniform(0, 600), [0]
        for _ in range(draw.randint(1, 8)):
            ids = [*ids, *range(block, block + 4)]
            block += 4
            found.append(TraceRequest(timestamp=1000 * now, input_length=512 * len(ids), output_length=50, hash_ids=ids))
            now += draw.uniform(30, 90)
    return sorted(found, key=lambda request: request.timestamp)


def test_conversations_find_their_cache_with_one_gateway_and_with_several() -> None:
    result = measure(conversations(150), 4, 0.5, 1.0, [1, 3])
    rows = result["policies"]
    assert set(rows) > {"npufleet", "npufleet_3_gateways", "round_robin", "random", "least_outstanding", "consistent_hash"}
    for name in ("npufleet", "npufleet_3_gateways"):
        assert rows[name]["hit_rate"] > 1.5 * rows["round_robin"]["hit_rate"]
        assert 1 <= rows[name]["tokens_max_over_mean"] <= 4
    assert all(0 <= row["hit_rate"] <= 1 and row["in_flight_max_over_mean"] >= 1 for row in rows.values())
    assert set(result["microseconds_per_pick"]) == {"1", "3"}


def test_one_replica_is_the_shared_cache() -> None:
    result = measure(conversations(20), 1, 0.5, 1.0, [1])
    assert {row["of_shared_percent"] for row in result["policies"].values()} == {100}
    assert {row["tokens_max_over_mean"] for row in result["policies"].values()} == {1}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.prefix_routing", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines: list[dict[str, Any]] = [{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]} for _ in range(3)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("--trace", str(trace), "--json", "--gateways", "1", "--replicas", "2", "--capacity", "1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"]["npufleet"]["hit_rate"] > 0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--trace", "/nowhere"], "Mooncake"),
        (["--trace", "/nowhere", "--capacity", "2"], "--capacity"),
        (["--trace", "/nowhere", "--replicas", "0"], "--replicas"),
        (["--trace", "/nowhere", "--speed", "0"], "--speed"),
    ],
)
def test_a_bad_argument_is_one_line_with_the_remedy(arguments: list[str], names: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert names in done.stderr.splitlines()[-1]
