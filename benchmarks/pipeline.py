"""Throughput by pipeline depth, and how much of the time compute waited: `python -m benchmarks.pipeline --json`.

Engines of every depth serve the same requests by turns, so that what else the machine does hits all alike; medians are given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from npufleet_api.pool import Device
from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.engine import Engine
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams
from npufleet_pod.engine.stats import FinishedRequest

TESTS = Path(__file__).resolve().parents[1] / "tests"
DEPTHS = (1, 2, 4)


class Silent:
    """An observer that is not interested."""

    def on_step(self, tokens: int, preempted: int) -> None: ...

    def on_prefix_lookup(self, sought: int, found: int) -> None: ...

    def on_first_token(self, prompt_tokens: int, ttft_seconds: float) -> None: ...

    def on_next_token(self, interval_seconds: float) -> None: ...

    def on_finish(self, finished: FinishedRequest) -> None: ...


@dataclass
class Measured:
    """Rounds of one depth."""

    tokens_per_second: list[float] = field(default_factory=list)
    waited_seconds: float = 0
    computed_seconds: float = 0

    def summary(self) -> dict[str, float]:
        """Medians."""
        busy = self.waited_seconds + self.computed_seconds
        return {
            "tokens_per_second": round(statistics.median(self.tokens_per_second), 1),
            "compute_wait_percent": round(100 * self.waited_seconds / busy, 2) if busy else 0.0,
        }


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="A model's folder; by default a small random one is made.")
@click.option("--requests", "count", type=click.IntRange(1, 1024), default=32, show_default=True, help="Requests at once.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--answer-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=None, help="Compute threads of all ranks; by default all.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    model: Path | None, count: int, prompt_tokens: int, answer_tokens: int, rounds: int, threads: int | None, ranks: int, as_json: bool
) -> None:
    """Compare pipeline depths in one run."""
    with contextlib.ExitStack() as stack:
        folder = model or _random_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        result = asyncio.run(_compare(folder, count, prompt_tokens, answer_tokens, rounds, threads, ranks))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for depth, numbers in result["depth"].items():  # type: ignore[attr-defined] # a mapping by construction
        print(f"depth {depth}: {numbers['tokens_per_second']} tokens/s, compute waited {numbers['compute_wait_percent']} %")


def _random_model(folder: Path) -> Path:
    sys.path.insert(0, str(TESTS))
    from support.tiny_model import write_tiny_model

    return write_tiny_model(folder, hidden_size=256, layers=6, heads=8, kv_heads=4)


async def _compare(
    folder: Path, count: int, prompt_tokens: int, answer_tokens: int, rounds: int, threads: int | None, ranks: int
) -> dict[str, object]:
    measured = {depth: Measured() for depth in DEPTHS}
    for number in range(rounds):
        # Turned round by turn, so that nobody always goes first; one engine at a time, so that none sits in another's way.
        for depth in DEPTHS[number % len(DEPTHS) :] + DEPTHS[: number % len(DEPTHS)]:
            async with _engine(folder, depth, count, threads, ranks) as engine:
                await _round(engine, -1, min(count, 4), prompt_tokens, answer_tokens, Measured())
                await _round(engine, number, count, prompt_tokens, answer_tokens, measured[depth])
    base = measured[DEPTHS[0]].summary()["tokens_per_second"]
    return {
        "requests": count,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "rounds": rounds,
        "ranks": ranks,
        "depth": {str(depth): one.summary() for depth, one in measured.items()},
        "speedup": {str(depth): round(one.summary()["tokens_per_second"] / base, 3) for depth, one in measured.items()},
    }


@contextlib.asynccontextmanager
async def _engine(folder: Path, depth: int, count: int, threads: int | None, ranks: int):  # type: ignore[no-untyped-def] # an async context manager
    settings = EngineSettings(
        model_path=str(folder),
        served_name="model",
        device=Device.CPU,
        pipeline_depth=depth,
        max_num_sequences=count,
        prefix_cache=False,
        cpu_threads=threads,
        tensor_parallel=ranks,
    )
    files = inspect_model(settings)
    engine = Engine(lambda keep_going: load_engine(settings, files, keep_going), Silent())
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


async def _round(engine: Engine, number: int, count: int, prompt_tokens: int, answer_tokens: int, into: Measured) -> None:
    source = random.Random(number)  # noqa: S311 - prompts of a benchmark
    requests = [
        GenerationRequest(
            f"{number}-{index}",
            tuple(source.randrange(3, 250) for _ in range(prompt_tokens)),
            StopParams(max_tokens=answer_tokens, ignore_eos=True, stop_strings=("\0never",)),
            SamplingParams(temperature=0),
        )
        for index in range(count)
    ]
    waited, computed = engine.pipeline_seconds()
    began = time.perf_counter()
    with engine.submit(requests) as generation:
        while not generation.finished:
            await generation.next()
    seconds = time.perf_counter() - began
    into.tokens_per_second.append(count * answer_tokens / seconds)
    now_waited, now_computed = engine.pipeline_seconds()
    into.waited_seconds += now_waited - waited
    into.computed_seconds += now_computed - computed


if __name__ == "__main__":
    main()
