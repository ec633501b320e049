"""An engine of several rank processes: the same tokens as one, whatever the schedule, and no end that is not told and bounded."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from npufleet_api.contract import EngineExit
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.distributed.communication import ROUTE_ENV
from npufleet_pod.engine.engine import Engine
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.request import GenerationRequest, SamplingParams
from npufleet_pod.errors import GenerationError, LoadCancelledError, RankError, RankStartError
from support.greedy import transformers_greedy
from support.local_engine import Recorder, collect, generate, local_engine, request
from support.prompts import COUNT, PROMPTS
from support.rank_processes import is_gone, rank_pids
from support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "depth 4, chunks of 16": {"pipeline_depth": 4, "max_num_batched_tokens": 16},
    "little memory": {"kv_blocks": 14, "block_size": 16},
    "scattered memory, no prefix cache": {"continuous_memory": False, "block_size": 16, "prefix_cache": False, "pipeline_depth": 1},
}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    return transformers_greedy(tiny_model, PROMPTS, COUNT)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "depth 4, chunks of 16"), (2, "little memory"), (3, "depth 4, chunks of 16"), (4, "scattered memory, no prefix cache")],
)
async def test_greedy_tokens_of_rank_processes_equal_transformers(
    ranks: int, name: str, tiny_model: Path, expected: list[list[int]]
) -> None:
    recorder = Recorder()
    async with local_engine(tiny_model, recorder, tensor_parallel=ranks, cpu_threads=1, **CONFIGURATIONS[name]) as engine:
        pids = rank_pids()
        assert len(pids) == ranks - 1
        for turn in range(2):
            requests = [request(f"{turn}.{index}", prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
            assert await generate(engine, *requests) == expected
    if name == "little memory":
        assert recorder.preempted > 0
    if CONFIGURATIONS[name].get("prefix_cache", True):
        assert recorder.found > 0
    assert all(is_gone(pid) for pid in pids)


async def test_ranks_that_exchange_through_torch_distributed_say_the_same(
    tiny_model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What NPUs do through HCCL is the same code through Gloo here.
    monkeypatch.setenv(ROUTE_ENV, "backend")
    async with local_engine(tiny_model, tensor_parallel=3, cpu_threads=1, pipeline_depth=4) as engine:
        assert distributed.is_initialized()
        assert await generate(engine, *[request(str(index), prompt, COUNT) for index, prompt in enumerate(PROMPTS)]) == expected
    assert not distributed.is_initialized()


@pytest.mark.parametrize("depth", [1, 4])
async def test_pages_of_all_ranks_move_between_the_tiers(depth: int, tiny_model: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    tiers: dict[str, Any] = {"host_cache_mi": 1, "disk_cache_mi": 1, "disk_cache_path": str(tmp_path / "kv")}
    ranks: dict[str, Any] = {"tensor_parallel": 3, "cpu_threads": 1}
    async with local_engine(tiny_model, kv_blocks=20, block_size=16, pipeline_depth=depth, **tiers, **ranks) as engine:
        for turn in range(3):
            fillers = [request(f"filler {turn}.{index}", [index + 3] * 200, 2) for index in range(14)]
            requests = [request(f"{turn}.{index}", prompt, COUNT) for index, prompt in enumerate(PROMPTS)]
            assert (await generate(engine, *requests, *fillers))[: len(PROMPTS)] == expected
        moved = engine.residency()
    assert moved.stored > 0
    assert moved.loaded > 0
    assert moved.spilled > 0


async def test_samples_and_scores_of_prompts_do_not_depend_on_the_ranks(tiny_model: Path) -> None:
    def requests() -> list[GenerationRequest]:
        sampling = [SamplingParams(temperature=1.2, top_p=0.9, seed=index, frequency_penalty=0.5) for index in range(3)]
        return [
            GenerationRequest(one.request_id, one.prompt_token_ids, one.stop, one.sampling, logprobs=2, prompt_logprobs=1)
            for one in (request(str(index), PROMPTS[index], COUNT, sampling[index]) for index in range(3))
        ]

    async def scored(ranks: int) -> list[Any]:
        async with local_engine(tiny_model, tensor_parallel=ranks, cpu_threads=1, max_num_batched_tokens=33) as engine:
            return [await outputs(engine, one) for one in requests()]

    async def outputs(engine: Engine, one: GenerationRequest) -> list[Any]:
        with engine.submit([one]) as generation:
            found = []
            while not generation.finished:
                found.append((await generation.next())[1])
            return found

    alone, together = await scored(1), await scored(2)
    for ours, theirs in zip(together, alone, strict=True):
        assert [output.token_id for output in ours] == [output.token_id for output in theirs]
        assert prompt_scores(ours) == pytest.approx(prompt_scores(theirs), abs=1e-4)
        assert answer_scores(ours) == pytest.approx(answer_scores(theirs), abs=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
async def test_int8_kv_heads_and_rotation_by_length_are_the_ranks_too(ranks: int, tmp_path: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    model = write_tiny_model(tmp_path / "model", seed=3, max_positions=32, config=rope)
    prompts = [list(range(3, 90)), list(range(40, 70)), [7, 8, 9]]
    settings: dict[str, Any] = {"max_num_batched_tokens": 40, "precision": {"kvCache": "Int8"}, "cpu_threads": 1}
    async with local_engine(model, **settings) as engine:
        alone = await generate(engine, *[request(str(index), prompt, 12) for index, prompt in enumerate(prompts)])
    async with local_engine(model, tensor_parallel=ranks, **settings) as engine:
        assert await generate(engine, *[request(str(index), prompt, 12) for index, prompt in enumerate(prompts)]) == alone


def prompt_scores(outputs: list[Any]) -> list[float]:
    return [entry.logprob for entry in outputs[0].prompt_logprobs if entry is not None]


def answer_scores(outputs: list[Any]) -> list[float]:
    return [placed.logprobs.logprob for output in outputs for placed in output.logprobs]


@asynccontextmanager
async def failing(model: Path, **settings: Any) -> AsyncIterator[tuple[Engine, list[int], Callable[[], Awaitable[str]]]]:
    """A ready engine of three ranks that computes an endless request; the function waits for its end and gives the reason."""
    async with local_engine(model, tensor_parallel=3, cpu_threads=1, **settings) as engine:
        generation = engine.submit([request("endless", [5, 6], 2000)])
        await generation.next()

        async def end() -> str:
            with pytest.raises(RankError) as caught:
                await engine.wait_ended()
            with pytest.raises(GenerationError, match="the engine stopped: try again"):
                await collect(generation)
            return str(caught.value)

        yield engine, rank_pids(), end


@pytest.mark.parametrize("route", ["auto", "backend"])
async def test_a_rank_that_dies_in_the_middle_of_a_step_ends_the_engine_by_name(
    route: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROUTE_ENV, route)
    async with failing(tiny_model) as (_, pids, end):
        os.kill(pids[1], signal.SIGKILL)
        assert (await end()).startswith(f"rank 2 (pid {pids[1]}) was killed by SIGKILL: if nobody did it, memory ran out")
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("route", ["auto", "backend"])
async def test_a_rank_that_is_stopped_ends_the_engine_by_name(route: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROUTE_ENV, route)
    async with failing(tiny_model, rank_timeout_seconds=4) as (_, pids, end):
        os.kill(pids[0], signal.SIGSTOP)
        assert await end() == f"rank 1 (pid {pids[0]}) is stopped by a signal: no rank moved for 4 s, rankTimeoutSeconds is 4"
    assert all(is_gone(pid) for pid in pids)


HANGS = "forward = lambda *_: time.sleep(10000)"
FAILS = "def forward(*_): raise MemoryError('17 GiB')"


def change_rank(number: int, forward: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rank `number` compute its 20th step as `forward` says."""
    (folder / "sitecustomize.py").write_text(
        "import sys, time\n"
        f"{forward}\n"
        f"if 'npufleet_pod.engine.distributed.worker' in sys.orig_argv and sys.orig_argv[4] == '{number}':\n"
        "    from npufleet_pod.engine import rank\n"
        "    steps, original = [], rank.Rank.forward\n"
        "    rank.Rank.forward = lambda *given: steps.append(1) or (forward if len(steps) == 20 else original)(*given)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


async def test_a_rank_that_hangs_is_known_by_being_behind(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_rank(2, HANGS, tmp_path, monkeypatch)
    async with failing(tiny_model, rank_timeout_seconds=4) as (_, pids, end):
        reason = await end()
        assert re.fullmatch(rf"rank 2 \(pid {pids[1]}\) hangs, \d+ exchanges behind the others: no rank moved for 4 s, .*", reason)
    assert all(is_gone(pid) for pid in pids)


async def test_a_rank_that_fails_in_a_step_says_why(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_rank(1, FAILS, tmp_path, monkeypatch)
    async with failing(tiny_model) as (_, pids, end):
        assert await end() == f"rank 1 (pid {pids[0]}) failed: MemoryError: 17 GiB"
    assert all(is_gone(pid) for pid in pids)


async def test_a_rank_that_dies_while_nothing_runs_ends_the_engine_too(tiny_model: Path) -> None:
    async with local_engine(tiny_model, tensor_parallel=2, cpu_threads=1) as engine:
        (pid,) = rank_pids()
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\) was killed by SIGTERM"):
            await engine.wait_ended()
    assert is_gone(pid)


async def test_a_rank_that_cannot_load_is_named_with_its_reason_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model")
    damaged = tmp_path / "sitecustomize"
    damaged.mkdir()
    # The file is not there for rank 1 alone, as on a volume that one process fails to read.
    (damaged / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'npufleet_pod.engine.distributed.worker' in ' '.join(sys.orig_argv):\n"
        "    import npufleet_pod.models.checkpoint as checkpoint\n"
        "    checkpoint.SINGLE_FILE = 'nothing.safetensors'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(damaged))
    with pytest.raises(RankStartError, match=r"rank 1: .*nothing.safetensors: no such file") as caught:
        async with local_engine(model, tensor_parallel=2, cpu_threads=1):
            pass
    assert caught.value.exit_code == EngineExit.MODEL
    assert rank_pids() == []


async def test_a_rank_that_hangs_while_it_loads_ends_the_start(tiny_model: Path) -> None:
    engine = starting(tiny_model, 2, rank_timeout_seconds=1)
    await ranks_started(1)
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\) is stopped by a signal: no rank moved for 10 s"):
        await engine.wait_ready()
    await engine.stop()
    assert is_gone(pid)


async def test_an_engine_that_is_stopped_while_its_ranks_load_leaves_none_behind(tiny_model: Path) -> None:
    engine = starting(tiny_model, 3)
    await ranks_started(2)
    await engine.stop()
    with pytest.raises(LoadCancelledError):
        await engine.wait_ready()
    assert rank_pids() == []


def starting(model: Path, ranks: int, **fields: Any) -> Engine:
    """An engine that has begun to load."""
    document = {"model_path": str(model), "served_name": "m", "device": "CPU", "cpu_threads": 1, "tensor_parallel": ranks, **fields}
    settings = EngineSettings.model_validate(document)
    files = inspect_model(settings)
    engine = Engine(lambda keep_going: load_engine(settings, files, keep_going), Recorder())
    engine.start()
    return engine


async def ranks_started(count: int) -> None:
    async with asyncio.timeout(60):
        while len(rank_pids()) < count:  # noqa: ASYNC110 - the kernel tells nobody of a process
            await asyncio.sleep(0.01)
