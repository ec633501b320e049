"""The benchmarks of the memory: the policies they compare with, the traces they read, and what they print."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.memory.layout import CacheLayout

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))  # benchmarks are run from the repository and not installed

from benchmarks.fragmentation import replay  # noqa: E402 - after the path
from benchmarks.prefix_cache import engine_hits, measure  # noqa: E402
from benchmarks.replacement import belady_hits, infinite_hits, lru_hits, s3fifo_hits  # noqa: E402
from benchmarks.traces import TraceError, TraceRequest, read_any_trace, read_trace  # noqa: E402


def chats(count: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations and prompts that are asked once, behind a common first block."""
    draw = random.Random(seed)  # noqa: S311 - not for secrets
    requests: list[TraceRequest] = []
    waiting: list[tuple[float, list[int]]] = []
    block, now = 1, 0.0
    while len(requests) < count:
        now += draw.expovariate(1.0)
        due = [item for item in waiting if item[0] <= now]
        waiting = [item for item in waiting if item[0] > now]
        for prefix in [[0], *(ids for _, ids in due)]:
            size = draw.randint(1, 9)
            ids = [*prefix, *range(block, block + size)]
            block += size
            requests.append(
                TraceRequest(timestamp=1000 * now, input_length=512 * len(ids) - 100, output_length=draw.randint(1, 300), hash_ids=ids)
            )
            if draw.random() < (0.4 if len(prefix) == 1 else 0.8):
                # The last block was not full: the next turn has another one there.
                waiting.append((now + draw.expovariate(1 / 60), ids[:-1]))
    return requests[:count]


def brute_force_hits(blocks: Sequence[int], capacity: int) -> int:
    """The most hits of any choice of what to keep."""

    @cache
    def best(index: int, cache: frozenset[int]) -> int:
        if index == len(blocks):
            return 0
        hit = blocks[index] in cache
        held = cache | {blocks[index]}
        choices = [held] if len(held) <= capacity else [held - {block} for block in held]
        return hit + max(best(index + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=10), st.integers(1, 3))
@settings(deadline=None)
def test_the_optimum_is_the_optimum(blocks: list[int], capacity: int) -> None:
    assert belady_hits(blocks, capacity) == brute_force_hits(blocks, capacity)


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 40))
@settings(deadline=None)
def test_no_policy_beats_the_optimum_and_room_for_all_hits_all(blocks: list[int], capacity: int) -> None:
    assert max(lru_hits(blocks, capacity), s3fifo_hits(blocks, capacity)) <= belady_hits(blocks, capacity) <= infinite_hits(blocks)
    assert lru_hits(blocks, 31) == belady_hits(blocks, 31) == infinite_hits(blocks)


def test_policies_on_a_case_by_hand() -> None:
    blocks = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1]
    assert (lru_hits(blocks, 2), lru_hits(blocks, 3), belady_hits(blocks, 2)) == (0, 5, 5)
    # 1 is used twice while it is in the short queue and moves to the main one, where a scan does not reach it.
    assert s3fifo_hits([*range(1, 11), 1, 1, *range(20, 30), 1, 2], 10) == 3
    # As a ghost, 2 comes back into the main queue, which the next scan does not reach either.
    assert s3fifo_hits([*range(1, 11), *range(20, 23), 2, *range(30, 50), 2], 10) == 1


@given(st.integers(0, 1000), st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_the_engine_never_beats_the_optimum(seed: int, capacity: int) -> None:
    requests = chats(60, seed)
    blocks = [block for request in requests for block in request.hash_ids]
    assert engine_hits(requests, capacity) <= belady_hits(blocks, capacity)
    assert engine_hits(requests, len(blocks)) == infinite_hits(blocks)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.3, 0.6])
def test_conversations_hit_at_least_as_often_as_with_lru(share: float) -> None:
    figures = measure(chats(1500), share)
    rates = figures["hit_rate"]
    assert set(rates) == {"npufleet", "lru", "s3fifo", "belady", "infinite"}
    assert rates["npufleet"] >= rates["lru"]
    assert figures["tiered_share_of_possible_percent"] >= 99


def test_little_memory_is_reserved_without_a_token() -> None:
    requests = chats(20)
    paged, contiguous = replay(requests, CacheLayout(16, 16, 100_000))
    large, _ = replay(requests, CacheLayout(16, 128, 10_000))
    assert 0 < paged.percent < large.percent < contiguous.percent
    assert paged.percent < 4.8


def test_the_command_prints_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(request.model_dump_json() + "\n" for request in chats(100)))
    for command in (["benchmarks.prefix_cache", "--capacity", "0.1"], ["benchmarks.memory", "--parts", "fragmentation", "--requests", "5"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, "--trace", str(path), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert json.loads(done.stdout)


def test_a_run_is_split_into_parts_that_add_up_and_updates_are_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--json", "--quick", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=110)
    result = json.loads(done.stdout)
    peak = result["peak_memory"]
    parts = [peak[f"{name}_mib"] for name in ("weights", "kv", "activations", "scratch")]
    assert sum(parts) == pytest.approx(peak["peak_mib"], abs=0.01)
    assert min(parts[:3]) > 0
    assert peak["process_mib"] > peak["peak_mib"]
    assert {point["model"] for point in result["kv_update_by_shape"]} == {"smollm2", "72b"}
    assert result["kv_update_saved_percent"] <= 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request has hash_ids"),
        ('{"timestamp": 0, "hash_ids": []}\n', "no request has hash_ids"),
        ('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1, "hash_ids": [', "line 2"),
        ('{"timestamp": 0}', "line 1.*hash_ids"),
        ('{"timestamp": -1, "hash_ids": [1]}', "line 1.*timestamp"),
        ('{"timestamp": 0, "hash_ids": ["x"]}', "line 1.*hash_ids"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_a_trace_that_is_none_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent")


def test_a_trace_without_times_and_one_out_of_order_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1], "extra": true}\n\n{"hash_ids": [2]}\n')
    assert [request.timestamp for request in read_trace(path)] == [0, 1000]
    path.write_text('{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 3, "hash_ids": [2]}\n')
    assert [request.hash_ids for request in read_trace(path)] == [[2], [1]]


def test_azures_csv_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,5,8\n")
    first, second = read_any_trace(path)
    assert (first.timestamp, first.input_length, first.output_length, second.timestamp) == (0, 4808, 10, 1000)
    path.write_text("TIMESTAMP,Tokens\nx,1\n")
    with pytest.raises(TraceError, match="give a CSV with the columns TIMESTAMP"):
        read_any_trace(path)
