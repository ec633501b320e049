"""An engine in the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from npufleet_api.settings import EngineSettings
from npufleet_pod.engine.engine import Engine
from npufleet_pod.engine.generation import Generation
from npufleet_pod.engine.loading import load_engine
from npufleet_pod.engine.model_files import inspect_model
from npufleet_pod.engine.profiles import with_profile
from npufleet_pod.engine.request import GenerationRequest, SamplingParams, StopParams, TokenOutput
from npufleet_pod.engine.stats import FinishedRequest

GREEDY = SamplingParams(temperature=0)


class Recorder:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []
        self.step_tokens: list[int] = []
        self.preempted = 0
        self.sought = self.found = 0

    def on_step(self, tokens: int, preempted: int) -> None:
        self.step_tokens.append(tokens)
        self.preempted += preempted

    def on_prefix_lookup(self, sought: int, found: int) -> None:
        assert 0 <= found <= sought
        self.sought += sought
        self.found += found

    def on_first_token(self, prompt_tokens: int, ttft_seconds: float) -> None:
        assert ttft_seconds >= 0

    def on_next_token(self, interval_seconds: float) -> None:
        assert interval_seconds >= 0

    def on_finish(self, finished: FinishedRequest) -> None:
        self.finished.append(finished)


@contextlib.asynccontextmanager
async def local_engine(
    model: Path, recorder: Recorder | None = None, *, kv_blocks: int | None = None, **settings: object
) -> AsyncIterator[Engine]:
    """A ready engine of `model`; kv_blocks cuts its memory."""
    parsed = with_profile(EngineSettings.model_validate({"model_path": str(model), "served_name": "m", "device": "CPU", **settings}))
    files = inspect_model(parsed)

    def load(keep_going):  # type: ignore[no-untyped-def] # the engine's own callable
        loaded = load_engine(parsed, files, keep_going)
        return loaded if kv_blocks is None else replace(loaded, limits=replace(loaded.limits, kv_blocks=kv_blocks))

    engine = Engine(load, recorder or Recorder(), parsed.seed)
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def request(name: str, prompt: Sequence[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY, **stop: object) -> GenerationRequest:
    """A request for `max_tokens` tokens that no end of sequence cuts short, unless `stop` says otherwise."""
    params = StopParams(max_tokens=max_tokens, **{"ignore_eos": True, **stop})  # type: ignore[arg-type] # keyword arguments of a test
    return GenerationRequest(name, tuple(prompt), params, sampling)


async def collect(generation: Generation) -> list[TokenOutput]:
    """All outputs of a generation of one request."""
    with generation:
        outputs = []
        while not generation.finished:
            _, output = await generation.next()
            outputs.append(output)
        return outputs


async def generate(engine: Engine, *requests: GenerationRequest) -> list[list[int]]:
    """Token ids of each request, all submitted at once."""
    results = await asyncio.gather(*(collect(engine.submit([one])) for one in requests))
    return [[output.token_id for output in outputs] for outputs in results]
