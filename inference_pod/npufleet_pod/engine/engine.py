"""Ties scheduler, pipeline and runner to asyncio: threads of its own compute, the event loop submits, cancels and receives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npufleet_pod.engine.active import ActiveRequest, Times
from npufleet_pod.engine.changes import Added, Change
from npufleet_pod.engine.generation import Generation
from npufleet_pod.engine.loaded import LoadedEngine, Runner
from npufleet_pod.engine.memory.layout import CacheScope
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.memory.residency import ResidencyStats
from npufleet_pod.engine.pipeline import PipelineController, ThreeStagePipeline
from npufleet_pod.engine.request import FinishReason, GenerationFailed, GenerationRequest, Output, SampledToken
from npufleet_pod.engine.scheduler import Scheduler
from npufleet_pod.engine.stats import EngineObserver, EngineSnapshot
from npufleet_pod.engine.step import Step
from npufleet_pod.errors import GenerationError, LoadCancelledError, RankError, TransferError

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the engine gives up, so that the container is restarted."""
JOIN_SECONDS = 15.0
"""Time in which compute comes back once its ranks have been ended, before it is left behind."""
INTEGRITY_CHECK_SECONDS = 30.0
"""Shortest time between two looks at all of the memory's bookkeeping; only an idle engine looks."""


@dataclass(slots=True)
class _Submitted:
    active: ActiveRequest
    generation: Generation
    index: int


@dataclass(frozen=True, slots=True)
class _Work:
    """A step on its way through the pipeline; `batch` is the runner's, or what went wrong when it was made."""

    step: Step
    batch: Any


@dataclass(frozen=True, slots=True)
class _Outcome:
    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    error: Exception | None = None
    skipped: bool = False


class Engine:
    """Serves requests on threads of its own; one of them loads the model and computes, so that all of torch's work has one owner."""

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
        self._controller: PipelineController | None = None
        self._loaded: LoadedEngine | None = None
        self._submitted: dict[str, _Submitted] = {}
        self._changes: list[Change] = []
        """For the runner, in order."""
        self._failures = 0
        self._checked_at = clock()
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
        """Wait until the threads have ended, or the engine has failed. Raises what ended it, unless it was stopped."""
        assert self._ended is not None, "start comes first"  # noqa: S101 - a caller's mistake, not a condition
        await asyncio.shield(self._ended)

    def snapshot(self) -> EngineSnapshot:
        """The present load; all zero while loading."""
        with self._condition:
            if self._scheduler is None:
                return EngineSnapshot(0, 0, 0.0)
            return EngineSnapshot(self._scheduler.running, self._scheduler.waiting, self._scheduler.kv_usage)

    def stall_ratio(self) -> float:
        """Share of the last seconds' busy time that compute waited for its input, 0 to 1."""
        return 0.0 if self._controller is None else self._controller.stall_ratio

    def residency(self) -> ResidencyStats:
        """What KV moved between device, host and disk so far."""
        with self._condition:
            return ResidencyStats() if self._scheduler is None else replace(self._scheduler.memory.residency_stats)

    def pipeline_seconds(self) -> tuple[float, float]:
        """How long compute has waited for work that was there, and how long it has worked."""
        return (0.0, 0.0) if self._controller is None else (self._controller.waited_seconds, self._controller.computed_seconds)

    def submit(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Queue all of `requests` or none. Raises InvalidRequestError, QueueFullError, or GenerationError if the engine is not running."""
        generation = Generation(self.cancel, [request.request_id for request in requests])
        with self._condition:
            scheduler, loaded = self._scheduler, self._loaded
            if scheduler is None or loaded is None or self._stopping:
                raise GenerationError("the engine is not running: try again later")
            for request in requests:
                scheduler.check(request.request_id, len(request.prompt_token_ids), request.stop.max_tokens)
            scheduler.check_room(len(requests))
            if scheduler.idle and self._controller is not None:
                self._controller.mark_busy()
            now = self._clock()
            for index, request in enumerate(requests):
                scheduler.add(
                    request.request_id, request.prompt_token_ids, request.stop.max_tokens, priority=request.priority, scope=_scope(request)
                )
                active = ActiveRequest(request, Times(now), loaded.eos_token_ids, _decoder(loaded, request))
                self._submitted[request.request_id] = _Submitted(active, generation, index)
                self._changes.append(Added(request, self._seeds.getrandbits(63)))
            self._condition.notify_all()
        return generation

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Give requests up wherever they are; those that have ended are left alone."""
        with self._condition:
            for request_id in list(request_ids):
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify_all()

    def abort_all(self, error: GenerationError) -> None:
        """End every request with `error`. Called on the event loop."""
        with self._condition:
            ended = [(self._submitted[request_id], request_id) for request_id in self._submitted]
            for _, request_id in ended:
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify_all()
        for submitted, request_id in ended:
            submitted.generation.deliver(submitted.index, request_id, GenerationFailed(error))

    def hand_back(self, error: GenerationError) -> None:
        """End every request of which nothing was computed with `error`; requests that were submitted together only if none of them has
        begun. Called on the event loop.
        """
        with self._condition:
            begun = {id(one.generation) for one in self._submitted.values() if one.active.times.scheduled is not None}
            waiting = [(one, request_id) for request_id, one in self._submitted.items() if id(one.generation) not in begun]
            for _, request_id in waiting:
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify_all()
        for one, request_id in waiting:
            one.generation.deliver(one.index, request_id, GenerationFailed(error))

    def fail(self, error: Exception) -> None:
        """Give up at once: every request gets an error, and `wait_ended` raises `error`, whether or not the threads come back."""
        self._tell(self._set_ended, error)
        self._stop_preparing()

    async def stop(self) -> None:
        """End the threads after their present step; whatever still runs gets an error. Harmless when repeated."""
        self._stop_preparing()
        if self._thread is not None:
            with contextlib.suppress(Exception):
                await self.wait_ended()
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
            if self._thread.is_alive():
                logger.error("compute does not come back", extra={"seconds": JOIN_SECONDS})
            self.abort_all(GenerationError("the engine stopped: try again"))

    def _keep_going(self) -> bool:
        return not self._stopping

    def _stop_preparing(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            loaded = self._load(self._keep_going)
            with contextlib.closing(loaded.tiers), contextlib.closing(loaded.ranks):
                loaded.ranks.watch(self.fail)
                self._serve(loaded)
        except LoadCancelledError:
            pass
        except BaseException as caught:  # noqa: BLE001 - handed to whoever waits for the thread
            error = caught
        self._stop_preparing()
        self._tell(self._set_ended, error)

    def _serve(self, loaded: LoadedEngine) -> None:
        tiers = loaded.tiers
        memory = KVCacheManager(loaded.limits.layout, self._clock, prefix_caching=loaded.prefix_cache, host=tiers.host, disk=tiers.disk)
        controller = PipelineController(loaded.policy.steps_in_flight, self._clock)
        with self._condition:
            self._loaded, self._controller = loaded, controller
            self._scheduler = scheduler = Scheduler(loaded.limits, loaded.policy, memory)
        self._tell(self._set_ready, loaded, None)
        ThreeStagePipeline[_Work, _Outcome](
            lambda: self._prepare(loaded.runner, scheduler),
            lambda work: self._compute(loaded.runner, work),
            lambda work, outcome: self._output(scheduler, work.step, outcome),
            controller,
            self._stop_preparing,
        ).run()

    def _prepare(self, runner: Runner, scheduler: Scheduler) -> _Work | None:
        """Wait for something to compute and make a batch of it; None once the engine is stopped."""
        with self._condition:
            while True:
                if self._stopping:
                    return None
                if scheduler.has_work or (self._changes and scheduler.idle):
                    step = scheduler.schedule()
                    self._observer.on_step(step.token_count, len(step.preempted))
                    if step.tokens or (self._changes and scheduler.idle):
                        break
                    continue
                self._check_integrity(scheduler)
                self._condition.wait()
            changes, self._changes = self._changes, []
            self._note_scheduled(step)
            looked_up, found = scheduler.take_prefix_counts()
            if looked_up:
                self._observer.on_prefix_lookup(looked_up, found)
        try:
            return _Work(step, runner.prepare(step, changes))
        except Exception as error:
            if step.transfers or isinstance(error, RankError):
                # The bookkeeping counts on what was to be moved; without its ranks the engine computes nothing.
                raise
            return _Work(step, error)

    def _compute(self, runner: Runner, work: _Work) -> _Outcome:
        if self._stopping:
            return _Outcome(skipped=True)
        if isinstance(work.batch, Exception):
            return _Outcome(error=work.batch)
        try:
            return _Outcome(runner.compute(work.batch))
        except (TransferError, RankError):
            raise
        except Exception as error:  # noqa: BLE001 - logged and counted by the output stage
            return _Outcome(error=error)

    def _output(self, scheduler: Scheduler, step: Step, outcome: _Outcome) -> None:
        if not step.tokens or outcome.skipped:
            return
        if outcome.error is None:
            self._failures = 0
            self._finish_step(scheduler, step, outcome.sampled)
            return
        logger.error("step failed", extra={"sequences": len(step.tokens)}, exc_info=outcome.error)
        if self._fail_step(scheduler, step):
            self._failures += 1
        if self._failures >= MAX_FAILED_STEPS:
            raise GenerationError(f"{self._failures} steps in a row failed, the last with {outcome.error!r}") from outcome.error

    def _finish_step(self, scheduler: Scheduler, step: Step, sampled: Mapping[str, SampledToken]) -> None:
        now = self._clock()
        with self._condition:
            live = scheduler.live(step)
            submitted = {request_id: self._submitted[request_id] for request_id in sampled if request_id in live}
        outputs = {request_id: one.active.push(sampled[request_id]) for request_id, one in submitted.items()}
        deliveries: list[tuple[Generation, int, str, Output]] = []
        with self._condition:
            live = scheduler.live(step)
            ended = []
            for request_id, output in outputs.items():
                if request_id not in live:
                    continue
                one = submitted[request_id]
                self._observe_token(one.active, now)
                deliveries.append((one.generation, one.index, request_id, output))
                if output.finish_reason is not None:
                    ended.append(request_id)
            scheduler.commit(step, {request_id: token.token_id for request_id, token in sampled.items()}, ended)
            for request_id in ended:
                reason = outputs[request_id].finish_reason
                assert reason is not None  # noqa: S101 - it is what put the request into the list
                self._drop(request_id, reason)
            self._condition.notify_all()
        if deliveries:
            self._tell(_deliver, deliveries)

    def _fail_step(self, scheduler: Scheduler, step: Step) -> bool:
        """End the step's requests; False if all had ended, as after an earlier step that failed."""
        failed = GenerationFailed(GenerationError("the engine failed while it computed this request"))
        deliveries: list[tuple[Generation, int, str, Output]] = []
        with self._condition:
            live = scheduler.live(step)
            scheduler.commit(step, failed=step.tokens)
            for request_id in live:
                one = self._submitted[request_id]
                deliveries.append((one.generation, one.index, request_id, failed))
                self._drop(request_id, FinishReason.ABORT)
            self._condition.notify_all()
        self._tell(_deliver, deliveries)
        return bool(live)

    def _note_scheduled(self, step: Step) -> None:
        now = self._clock()
        for request_id in step.tokens:
            submitted = self._submitted.get(request_id)
            if submitted is not None and submitted.active.times.scheduled is None:
                submitted.active.times.scheduled = now

    def _check_integrity(self, scheduler: Scheduler) -> None:
        now = self._clock()
        if scheduler.idle and now - self._checked_at >= INTEGRITY_CHECK_SECONDS:
            self._checked_at = now
            scheduler.check_integrity()

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
        if self._ended.done():
            return
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


def _scope(request: GenerationRequest) -> CacheScope:
    """What a request shares cached KV with. Where every position of the prompt has to be computed, that is nothing."""
    if request.prompt_logprobs is not None or request.pooling is not None:
        return CacheScope(salt=f"{request.cache_salt}\0{request.request_id}")
    return CacheScope(salt=request.cache_salt)


def _decoder(loaded: LoadedEngine, request: GenerationRequest) -> Callable[[Sequence[int]], str]:
    skip = request.skip_special_tokens
    return lambda token_ids: loaded.decode(token_ids, skip)


def _deliver(deliveries: Sequence[tuple[Generation, int, str, Output]]) -> None:
    for generation, index, request_id, output in deliveries:
        generation.deliver(index, request_id, output)
