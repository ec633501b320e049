"""Ties scheduler and runner to asyncio: one thread computes, the event loop submits, cancels and receives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from npufleet_pod.engine.active import ActiveRequest, Times
from npufleet_pod.engine.request import FinishReason, GenerationFailed, GenerationRequest, Output, SampledToken, TokenOutput
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, Step
from npufleet_pod.engine.stats import EngineObserver, EngineSnapshot
from npufleet_pod.errors import GenerationError, LoadCancelledError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up, so that the container is restarted."""


class Runner(Protocol):
    """Computes steps; see `runner.ModelRunner`."""

    def add(self, request: GenerationRequest, seed: int) -> None: ...

    def remove(self, request_id: str) -> None: ...

    def free_cache(self, request_ids: Iterable[str]) -> None: ...

    def execute(self, tokens: Mapping[str, int]) -> dict[str, SampledToken]: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading gives to the engine."""

    runner: Runner
    limits: SchedulerLimits
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int], bool], str]
    """Text of token ids; the flag leaves special tokens out."""


@dataclass(slots=True)
class _Submitted:
    active: ActiveRequest
    generation: Generation
    index: int


class Generation:
    """The answers to one or more requests, as they come. Leaving the context cancels whatever has not ended."""

    def __init__(self, engine: Engine, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._open = set(request_ids)
        self._outputs: asyncio.Queue[tuple[int, str, Output]] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.cancel(self._open)
        self._open.clear()

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return not self._open

    async def next(self) -> tuple[int, TokenOutput]:
        """(index of the request, its next token). Raises the GenerationError of a request that the engine gave up."""
        index, request_id, output = await self._outputs.get()
        if isinstance(output, GenerationFailed):
            self._open.discard(request_id)
            raise output.error
        if output.finish_reason is not None:
            self._open.discard(request_id)
        return index, output

    def deliver(self, index: int, request_id: str, output: Output) -> None:
        """Called on the event loop."""
        self._outputs.put_nowait((index, request_id, output))


class Engine:
    """Serves requests on a thread of its own, which also loads the model, so that all of torch's work has one owner."""

    def __init__(
        self,
        load: Callable[[Callable[[], bool]], LoadedEngine],
        observer: EngineObserver,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load: makes the model ready; it is given a function that turns False once the engine is stopped."""
        self._load = load
        self._observer = observer
        self._seeds = random.Random(seed)  # noqa: S311 - seeds of samplers, not secrets
        self._clock = clock
        self._condition = threading.Condition()
        self._stopping = False
        self._scheduler: Scheduler | None = None
        self._loaded: LoadedEngine | None = None
        self._submitted: dict[str, _Submitted] = {}
        self._changes: list[GenerationRequest | str] = []
        """For the runner, in order: requests to add, ids to remove."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[LoadedEngine] | None = None
        self._ended: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Begin to load. Called once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._ready, self._ended = self._loop.create_future(), self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def wait_ready(self) -> LoadedEngine:
        """Wait until requests can be served. Raises what loading raised."""
        assert self._ready is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        return await asyncio.shield(self._ready)

    async def wait_ended(self) -> None:
        """Wait until the thread has ended. Raises what ended it, unless it was stopped."""
        assert self._ended is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        await asyncio.shield(self._ended)

    def snapshot(self) -> EngineSnapshot:
        """The present load; all zero while loading."""
        with self._condition:
            if self._scheduler is None:
                return EngineSnapshot(0, 0, 0.0)
            return EngineSnapshot(self._scheduler.running, self._scheduler.waiting, self._scheduler.kv_usage)

    def submit(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Queue all of `requests` or none. Raises InvalidRequestError, QueueFullError, or GenerationError if the engine is not running."""
        generation = Generation(self, [request.request_id for request in requests])
        with self._condition:
            scheduler, loaded = self._scheduler, self._loaded
            if scheduler is None or loaded is None or self._stopping:
                raise GenerationError("the engine is not running: try again later")
            for request in requests:
                scheduler.check(len(request.prompt_token_ids), request.stop.max_tokens)
            scheduler.check_room(len(requests))
            now = self._clock()
            for index, request in enumerate(requests):
                scheduler.add(request.request_id, len(request.prompt_token_ids), request.stop.max_tokens)
                active = ActiveRequest(request, Times(now), loaded.eos_token_ids, _decoder(loaded, request))
                self._submitted[request.request_id] = _Submitted(active, generation, index)
                self._changes.append(request)
            self._condition.notify()
        return generation

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Give requests up wherever they are; those that have ended are left alone."""
        with self._condition:
            for request_id in list(request_ids):
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify()

    def abort_all(self, error: GenerationError) -> None:
        """End every request with `error`. Called on the event loop."""
        with self._condition:
            ended = [(self._submitted[request_id], request_id) for request_id in self._submitted]
            for _, request_id in ended:
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify()
        for submitted, request_id in ended:
            submitted.generation.deliver(submitted.index, request_id, GenerationFailed(error))

    async def stop(self) -> None:
        """End the thread after its present step; whatever still runs gets an error. Harmless when repeated."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            with contextlib.suppress(Exception):
                await self.wait_ended()
            self._thread.join()
            self.abort_all(GenerationError("the engine stopped: try again"))

    def _keep_going(self) -> bool:
        return not self._stopping

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            loaded = self._load(self._keep_going)
            with self._condition:
                self._loaded, self._scheduler = loaded, Scheduler(loaded.limits)
            self._tell(self._set_ready, loaded, None)
            self._serve(loaded, self._scheduler)
        except LoadCancelledError:
            pass
        except BaseException as caught:  # noqa: BLE001 - handed to whoever waits for the thread
            error = caught
        with self._condition:
            self._stopping = True
        self._tell(self._set_ended, error)

    def _serve(self, loaded: LoadedEngine, scheduler: Scheduler) -> None:
        failures = 0
        while True:
            with self._condition:
                while not (self._stopping or self._changes or scheduler.has_work):
                    self._condition.wait()
                if self._stopping:
                    return
                step = self._next_step(loaded.runner, scheduler)
            loaded.runner.free_cache(step.released)
            if not step.tokens:
                continue
            try:
                sampled = loaded.runner.execute(step.tokens)
            except Exception as error:
                failures += 1
                logger.exception("step failed", extra={"sequences": len(step.tokens), "failures_in_a_row": failures})
                self._fail_step(scheduler, step)
                if failures >= MAX_FAILED_STEPS:
                    raise GenerationError(f"{failures} steps in a row failed, the last with {error!r}") from error
                continue
            failures = 0
            self._finish_step(scheduler, step, sampled)

    def _next_step(self, runner: Runner, scheduler: Scheduler) -> Step:
        for change in self._changes:
            if isinstance(change, str):
                runner.remove(change)
            else:
                runner.add(change, self._seeds.getrandbits(63))
        self._changes.clear()
        step = scheduler.schedule()
        now = self._clock()
        for request_id in step.tokens:
            submitted = self._submitted.get(request_id)
            if submitted is not None and submitted.active.times.scheduled is None:
                submitted.active.times.scheduled = now
        self._observer.on_step(sum(step.tokens.values()), len(step.preempted))
        return step

    def _finish_step(self, scheduler: Scheduler, step: Step, sampled: Mapping[str, SampledToken]) -> None:
        now = self._clock()
        with self._condition:
            submitted = {request_id: self._submitted[request_id] for request_id in sampled if request_id in self._submitted}
        outputs = {request_id: one.active.push(sampled[request_id]) for request_id, one in submitted.items()}
        deliveries: list[tuple[Generation, int, str, Output]] = []
        with self._condition:
            ended = []
            for request_id, output in outputs.items():
                if request_id not in self._submitted:
                    continue
                one = submitted[request_id]
                self._observe_token(one.active, now)
                deliveries.append((one.generation, one.index, request_id, output))
                if output.finish_reason is not None:
                    ended.append(request_id)
            scheduler.commit(step, ended)
            for request_id, output in outputs.items():
                if output.finish_reason is not None and request_id in self._submitted:
                    self._drop(request_id, output.finish_reason)
        if deliveries:
            self._tell(_deliver, deliveries)

    def _fail_step(self, scheduler: Scheduler, step: Step) -> None:
        failed = GenerationFailed(GenerationError("the engine failed while it computed this request"))
        deliveries: list[tuple[Generation, int, str, Output]] = []
        with self._condition:
            scheduler.commit(step, failed=step.tokens)
            for request_id in step.tokens:
                one = self._submitted.get(request_id)
                if one is not None:
                    deliveries.append((one.generation, one.index, request_id, failed))
                    self._drop(request_id, FinishReason.ABORT)
        self._tell(_deliver, deliveries)

    def _observe_token(self, active: ActiveRequest, now: float) -> None:
        times = active.times
        if times.last_token is None:
            times.first_token = now
            self._observer.on_first_token(len(active.request.prompt_token_ids), now - times.arrived)
        else:
            self._observer.on_next_token(now - times.last_token)
        times.last_token = now

    def _drop(self, request_id: str, reason: FinishReason) -> None:
        """Forget a request that ended. Holds the lock."""
        submitted = self._submitted.pop(request_id, None)
        if submitted is None:
            return
        if self._scheduler is not None:
            self._scheduler.cancel(request_id)
        self._changes.append(request_id)
        self._observer.on_finish(submitted.active.finished(reason, self._clock()))

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        # The loop may be closed already when a stopped process leaves its thread behind.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_ready(self, loaded: LoadedEngine, _: None) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(loaded)

    def _set_ended(self, error: BaseException | None) -> None:
        assert self._ready is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        assert self._ended is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        if error is not None:
            self.abort_all(GenerationError("the engine stopped: try again"))
        if not self._ready.done():
            self._ready.set_exception(error or LoadCancelledError("the engine was stopped while it loaded"))
            self._ready.exception()
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()


def _decoder(loaded: LoadedEngine, request: GenerationRequest) -> Callable[[Sequence[int]], str]:
    skip = request.skip_special_tokens
    return lambda token_ids: loaded.decode(token_ids, skip)


def _deliver(deliveries: Sequence[tuple[Generation, int, str, Output]]) -> None:
    for generation, index, request_id, output in deliveries:
        generation.deliver(index, request_id, output)
