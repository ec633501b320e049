from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from npufleet_pod.engine.changes import Change
from npufleet_pod.engine.engine import MAX_FAILED_STEPS, Engine
from npufleet_pod.engine.loaded import LoadedEngine
from npufleet_pod.engine.request import FinishReason, SampledToken, SamplingParams
from npufleet_pod.engine.scheduler import SchedulerLimits
from npufleet_pod.engine.stats import EngineSnapshot
from npufleet_pod.engine.step import Step
from npufleet_pod.errors import (
    DrainDeadlineError,
    GenerationError,
    HandedBackError,
    InvalidRequestError,
    LoadCancelledError,
    ModelError,
    QueueFullError,
    RankError,
)
from npufleet_pod.tokenizer import load_tokenizer
from support.local_engine import Recorder, collect, generate, local_engine, request

IDLE = EngineSnapshot(0, 0, 0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=11)


async def settled(engine: Engine) -> None:
    """Wait until nothing runs; the test's timeout bounds it."""
    while engine.snapshot() != IDLE:  # noqa: ASYNC110 - the engine tells its load only when asked
        await asyncio.sleep(0.001)


async def test_seeded_samples_do_not_depend_on_the_batch(tiny_model: Path) -> None:
    async with local_engine(tiny_model) as engine:
        [alone] = await generate(engine, request("a", [5, 6, 7], 20, SAMPLED))
        others = [request(f"other{i}", [i, 40], 25, SamplingParams(temperature=1.5)) for i in range(6)]
        together = await generate(engine, *others[:3], request("b", [5, 6, 7], 20, SAMPLED), *others[3:])
        assert together[3] == alone
        [unseeded] = await generate(engine, request("c", [5, 6, 7], 20, SamplingParams(temperature=1.0)))
        assert unseeded != alone


async def test_seeded_samples_survive_preemption(tiny_model: Path) -> None:
    requests = [request(str(i), [i + 3] * 60, 60, SamplingParams(temperature=1.0, seed=i)) for i in range(4)]
    async with local_engine(tiny_model) as engine:
        alone = [(await generate(engine, one))[0] for one in requests]
    recorder = Recorder()
    async with local_engine(tiny_model, recorder, kv_blocks=4) as engine:
        assert await generate(engine, *requests) == alone
        await settled(engine)
    assert recorder.preempted > 0


async def test_an_answer_ends_at_max_tokens_at_a_stop_token_and_at_a_stop_string(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    async with local_engine(tiny_model) as engine:
        outputs = await collect(engine.submit([request("a", [5, 9], 12)]))
        tokens = [output.token_id for output in outputs]
        text = "".join(output.text for output in outputs)
        assert text == tokenizer.decode(tokens, True)
        assert [output.finish_reason for output in outputs] == [None] * 11 + [FinishReason.LENGTH]

        stop = tokens[5]
        ended = await collect(engine.submit([request("b", [5, 9], 12, stop_token_ids=frozenset({stop}))]))
        assert [output.token_id for output in ended] == tokens[: tokens.index(stop) + 1]
        assert (ended[-1].finish_reason, ended[-1].stop_reason) == (FinishReason.STOP, stop)

        cut = text[3:5]
        ended = await collect(engine.submit([request("c", [5, 9], 12, stop_strings=(cut,))]))
        assert "".join(output.text for output in ended) == text[: text.index(cut)]
        assert (ended[-1].finish_reason, ended[-1].stop_reason) == (FinishReason.STOP, cut)


async def test_the_end_of_sequence_ends_an_answer_unless_it_is_ignored_or_too_early(tiny_model: Path) -> None:
    hot = SamplingParams(temperature=3.0, seed=5)
    async with local_engine(tiny_model) as engine:
        [tokens] = await generate(engine, request("a", [5], 400, hot))
        first = min(tokens.index(eos) for eos in (0, 2) if eos in tokens)
        [ended] = await generate(engine, request("b", [5], 400, hot, ignore_eos=False))
        assert ended == tokens[: first + 1]
        [longer] = await generate(engine, request("c", [5], 400, hot, ignore_eos=False, min_tokens=first + 20))
        assert len(longer) > first + 20
        assert not {0, 2} & set(longer[: first + 20])


async def test_leaving_the_context_frees_running_and_queued_requests(tiny_model: Path) -> None:
    recorder = Recorder()
    async with local_engine(tiny_model, recorder, max_num_sequences=1) as engine:
        running = engine.submit([request("running", [5], 2000)])
        queued = engine.submit([request("queued", [6], 2000)])
        await running.next()
        load = engine.snapshot()
        assert (load.running, load.waiting) == (1, 1)
        with queued:
            pass
        assert engine.snapshot().waiting == 0
        with running:
            pass
        await settled(engine)
        [tokens] = await generate(engine, request("next", [5], 3))
        assert len(tokens) == 3
    assert [one.reason for one in recorder.finished] == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
    assert recorder.finished[0].ttft_seconds is None


async def test_many_random_departures_leave_nothing_behind(tiny_model: Path) -> None:
    generator = random.Random(1)  # noqa: S311 - a repeatable choice of departures
    recorder = Recorder()

    async def client(index: int) -> None:
        prompt = [generator.randrange(3, 250) for _ in range(generator.randrange(1, 40))]
        with engine.submit([request(str(index), prompt, generator.randrange(1, 60))]) as generation:
            for _ in range(generator.randrange(0, 30)):
                if generation.finished:
                    break
                await generation.next()

    async with local_engine(tiny_model, recorder, max_num_sequences=5, max_num_batched_tokens=24, kv_blocks=6) as engine:
        await asyncio.gather(*(client(index) for index in range(120)))
        await settled(engine)
    assert len(recorder.finished) == 120


async def test_several_requests_are_queued_together_or_not_at_all(tiny_model: Path) -> None:
    async with local_engine(tiny_model, max_num_sequences=1, max_queued_requests=2) as engine:
        with pytest.raises(QueueFullError):
            engine.submit([request(str(i), [5], 4) for i in range(4)])
        with pytest.raises(InvalidRequestError, match="no tokens"):
            engine.submit([request("a", [5], 4), request("b", [], 4)])
        assert engine.snapshot() == IDLE
        with engine.submit([request("a", [5], 4), request("b", [6], 4)]) as generation:
            indexes = []
            while not generation.finished:
                index, _ = await generation.next()
                indexes.append(index)
        assert sorted(indexes) == [0] * 4 + [1] * 4


async def test_abort_all_ends_every_request_with_the_error(tiny_model: Path) -> None:
    async with local_engine(tiny_model, max_num_sequences=1) as engine:
        generations = [engine.submit([request(str(i), [5], 2000)]) for i in range(3)]
        await generations[0].next()
        engine.abort_all(DrainDeadlineError("time is over"))
        for generation in generations:
            with pytest.raises(DrainDeadlineError, match="time is over"):
                await collect(generation)
        await settled(engine)


async def test_what_has_not_begun_is_handed_back_and_what_has_goes_on(tiny_model: Path) -> None:
    async with local_engine(tiny_model, max_num_sequences=1) as engine:
        running = engine.submit([request("0", [5], 20)])
        await running.next()
        waiting = [engine.submit([request(f"{i}{j}", [5], 2000) for j in range(i)]) for i in (1, 2)]
        engine.hand_back(HandedBackError("send it elsewhere"))
        for generation in waiting:
            with pytest.raises(HandedBackError, match="send it elsewhere"):
                await collect(generation)
        await collect(running)
        engine.hand_back(HandedBackError("nothing is left"))
        await settled(engine)


async def test_stop_ends_what_runs_with_an_error_and_refuses_more(tiny_model: Path) -> None:
    async with local_engine(tiny_model) as engine:
        generation = engine.submit([request("a", [5], 2000)])
        await generation.next()
        await engine.stop()
        with pytest.raises(GenerationError, match="stopped"):
            await collect(generation)
        with pytest.raises(GenerationError, match="not running"):
            engine.submit([request("b", [5], 4)])


async def test_prompts_that_begin_alike_share_their_kv_unless_salted_or_scored(tiny_model: Path) -> None:
    recorder = Recorder()
    prompt = list(range(5, 75))
    async with local_engine(tiny_model, recorder, block_size=16) as engine:
        [first] = await generate(engine, request("first", prompt, 5))
        assert (recorder.sought, recorder.found) == (70, 0)
        assert await generate(engine, request("second", prompt, 5)) == [first]
        assert (recorder.sought, recorder.found) == (140, 64)
        for name, changes in (("salted", {"cache_salt": "me"}), ("scored", {"prompt_logprobs": 1})):
            other = replace(request(name, prompt, 5), **changes)
            assert await generate(engine, other) == [first]
            assert recorder.found == 64
        await settled(engine)


class FaultyRunner:
    """Computes nothing: each step fails while `failing`, else gives token 7 to everyone."""

    def __init__(self, failing: bool) -> None:
        self.failing = failing

    def prepare(self, step: Step, changes: Sequence[Change]) -> Step:
        return step

    def compute(self, batch: Step) -> dict[str, SampledToken]:
        if self.failing:
            raise RuntimeError("device lost")
        return dict.fromkeys(batch.samples, SampledToken(7))


LIMITS = SchedulerLimits(4, 64, 4, 64, 16, 16)


def faulty(runner: FaultyRunner) -> Callable[[Callable[[], bool]], LoadedEngine]:
    return lambda keep_going: LoadedEngine(runner, LIMITS, frozenset(), lambda ids, skip: "x" * len(ids))


async def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    runner = FaultyRunner(failing=True)
    engine = Engine(faulty(runner), Recorder())
    engine.start()
    await engine.wait_ready()
    with pytest.raises(GenerationError, match="failed while it computed"):
        await collect(engine.submit([request("a", [1, 2], 4)]))
    runner.failing = False
    assert len(await collect(engine.submit([request("b", [1, 2], 4)]))) == 4
    await engine.stop()


async def test_failures_in_a_row_end_the_engine_so_that_the_container_is_restarted() -> None:
    engine = Engine(faulty(FaultyRunner(failing=True)), Recorder())
    engine.start()
    await engine.wait_ready()
    for index in range(MAX_FAILED_STEPS):
        with pytest.raises(GenerationError):
            await collect(engine.submit([request(str(index), [1], 4)]))
    with pytest.raises(GenerationError, match="3 steps in a row failed, the last with RuntimeError\\('device lost'\\)"):
        await engine.wait_ended()
    with pytest.raises(GenerationError, match="not running"):
        engine.submit([request("late", [1], 4)])
    await engine.stop()


async def test_what_loading_raises_reaches_whoever_waits() -> None:
    def fail(keep_going: Callable[[], bool]) -> LoadedEngine:
        raise ModelError("weights are gone")

    engine = Engine(fail, Recorder())
    engine.start()
    with pytest.raises(ModelError, match="weights are gone"):
        await engine.wait_ready()
    await engine.stop()


async def test_stop_while_loading_gives_loading_up() -> None:
    begun = threading.Event()

    def load(keep_going: Callable[[], bool]) -> LoadedEngine:
        begun.set()
        while keep_going():
            pass
        raise LoadCancelledError("given up")

    engine = Engine(load, Recorder())
    engine.start()
    await asyncio.to_thread(begun.wait)
    await engine.stop()
    with pytest.raises(LoadCancelledError):
        await engine.wait_ready()


class StuckRunner:
    """Computes until it is let go, as one whose ranks never answer."""

    def __init__(self) -> None:
        self.computes, self.released = threading.Event(), threading.Event()

    def prepare(self, step: Step, changes: Sequence[Change]) -> None:
        return None

    def compute(self, batch: None) -> dict[str, SampledToken]:
        self.computes.set()
        self.released.wait()
        return {}


class FailingRanks:
    """Ranks whose failure the test tells."""

    def __init__(self) -> None:
        self.fail: Callable[[Exception], None] = lambda error: None

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        self.fail = on_failure

    def close(self) -> None:
        pass


async def test_an_engine_whose_ranks_fail_ends_though_compute_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npufleet_pod.engine.engine.JOIN_SECONDS", 0.05)
    runner, ranks = StuckRunner(), FailingRanks()
    limits = SchedulerLimits(2, 64, 4, 64, kv_blocks=8, kv_block_tokens=16)
    loaded = LoadedEngine(runner, limits, frozenset(), lambda ids, skip: "", ranks=ranks)
    engine = Engine(lambda keep_going: loaded, Recorder())
    engine.start()
    await engine.wait_ready()
    generation = engine.submit([request("a", [5, 6], 4)])
    await asyncio.to_thread(runner.computes.wait)
    await asyncio.to_thread(ranks.fail, RankError("rank 3 hangs"))
    with pytest.raises(GenerationError, match="the engine stopped"):
        await collect(generation)
    with pytest.raises(RankError, match="rank 3 hangs"):
        await engine.wait_ended()
    await engine.stop()
    with pytest.raises(GenerationError, match="the engine is not running"):
        engine.submit([request("b", [5, 6], 4)])
    runner.released.set()
