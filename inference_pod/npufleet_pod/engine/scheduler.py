"""Continuous batching: decides, step by step, how many tokens of which request are computed. Imports no torch.

A step mixes next tokens and prompts, whole or in chunks. Several steps may be in flight: a step is decided before the tokens of the
one before it are known. Memory is given back by preemption only when nothing is in flight, so that what is given back is free at once
and one shortage cannot preempt one request after the other. Of the running requests the best by priority and arrival is never
preempted for memory, each makes room for a newcomer at most once, and every accepted request fits alone: so each one ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from npufleet_api.model import Preemption, SchedulingPolicy
from npufleet_pod.engine.memory.blocks import HierarchicalBlockTable
from npufleet_pod.engine.memory.layout import NO_SCOPE, CacheScope, Room
from npufleet_pod.engine.memory.manager import KVCacheManager
from npufleet_pod.engine.scheduler_limits import SchedulerLimits as SchedulerLimits
from npufleet_pod.engine.scheduler_limits import SchedulerPolicy as SchedulerPolicy
from npufleet_pod.engine.step import SequenceState, Step
from npufleet_pod.engine.waiting import WaitingQueue
from npufleet_pod.errors import ContextLengthError, InvalidRequestError, QueueFullError

WATERMARK = 0.01
"""Share of the memory that a request must leave free when it starts beside others, so that they do not preempt it at once (as in vLLM)."""


@dataclass(slots=True)
class _Flight:
    step: Step
    sequences: Mapping[str, SequenceState]
    memory_step: int


@dataclass(slots=True)
class _Plan:
    """A step while it is decided."""

    budget: int
    order: dict[str, SequenceState]
    counts: dict[str, int]
    prefilled: bool = False


class Scheduler:
    """Holds waiting and running requests. Not thread-safe. Steps are committed in the order in which they were decided."""

    def __init__(self, limits: SchedulerLimits, policy: SchedulerPolicy, memory: KVCacheManager) -> None:
        self.limits = limits
        self.policy = policy
        self.memory = memory
        self._looked_up = self._found = 0
        """Prompt tokens sought and found in the prefix cache since they were last asked for."""
        self._waiting = WaitingQueue(policy.starvation_steps)
        self._running: OrderedDict[str, SequenceState] = OrderedDict()
        self._flights: deque[_Flight] = deque()
        self._step_number = 0
        self._arrivals = 0
        self._emptying = False
        """Whether nothing more is decided until no step is in flight, since memory has to be given back."""
        self._refused: tuple[str, int] | None = None
        """Who waits for memory, and how many pages were free when it got none: with no more than those it need not be tried again."""
        self._settled = False
        """Whether nothing can be decided until a step is committed or a request comes or goes."""

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for their first step, or again after a preemption."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs and no step is in flight."""
        return not (self._running or self._waiting or self._flights)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""
        return self.memory.usage

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to say now."""
        return bool(self._running or self._waiting) and not self._settled and len(self._flights) < self.policy.steps_in_flight

    def check(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Raise InvalidRequestError if such a request can never be served, or its id is in use."""
        limits = self.limits
        if request_id in self._waiting or request_id in self._running or any(request_id in flight.sequences for flight in self._flights):
            raise InvalidRequestError(f"a request with the id {request_id} is being served: send another id")
        if prompt_tokens < 1:
            raise InvalidRequestError("the prompt has no tokens: send at least one", "prompt")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {max_tokens}: ask for at least 1", "max_tokens")
        total = prompt_tokens + max_tokens
        if total > limits.max_model_length:
            raise ContextLengthError(
                f"prompt and answer take {prompt_tokens} + {max_tokens} tokens, the model holds {limits.max_model_length}: "
                "shorten the prompt or lower max_tokens",
                "max_tokens" if prompt_tokens < limits.max_model_length else "prompt",
            )
        layout = self.memory.layout
        if layout.pages_for(total) > layout.page_count:
            raise ContextLengthError(
                f"prompt and answer take {prompt_tokens} + {max_tokens} tokens, this replica's memory holds "
                f"{layout.page_count * layout.page_tokens}: shorten the prompt or lower max_tokens",
                "max_tokens",
            )

    def check_room(self, requests: int) -> None:
        """Raise QueueFullError unless `requests` more can be taken."""
        limits = self.limits
        if self.running + self.waiting + requests > limits.max_num_sequences + limits.max_queued_requests:
            raise QueueFullError(f"{self.waiting} requests wait already, the limit is {limits.max_queued_requests}: try again later")

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        priority: int = 0,
        scope: CacheScope = NO_SCOPE,
    ) -> None:
        """Queue a request; of two, the lower priority goes first. Raises InvalidRequestError, or QueueFullError."""
        self.check(request_id, len(prompt), max_tokens)
        self.check_room(1)
        sequence = SequenceState(request_id, self._arrivals, priority, max_tokens, scope, list(prompt))
        self._arrivals += 1
        self._waiting.push(sequence, self._step_number)
        self.memory.prefetch(sequence.tokens, scope)
        self._settled = False

    def cancel(self, request_id: str) -> bool:
        """Give a request up wherever it is; False if it is unknown. Memory that a step in flight uses is free once the step ends."""
        self._settled = False
        if self._waiting.remove(request_id) is not None:
            return True
        sequence = self._running.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def schedule(self) -> Step:
        """Decide the next step. One without tokens is not in flight: nothing can be decided before the next commit, add or cancel."""
        if len(self._flights) >= self.policy.steps_in_flight:
            raise RuntimeError(f"schedule was called while {len(self._flights)} steps are in flight: commit one first")
        preempted: list[str] = []
        plan = _Plan(self.limits.max_num_batched_tokens, {}, {})
        if not self._flights:
            self._emptying = False
        if not self._emptying:
            ready = self._hold_memory(preempted)
            prompts = [sequence for sequence in ready if sequence.prefills]
            answers = [sequence for sequence in ready if not sequence.prefills]
            # A whole prompt needs a budget that the others have not used up.
            prompts_first = self.policy.policy is SchedulingPolicy.THROUGHPUT_OPTIMISED or not self.policy.chunked_prefill
            self._share(plan, prompts if prompts_first else answers)
            if not prompts_first:
                self._share(plan, prompts)
            if not preempted:
                self._admit(plan, preempted)
            if prompts_first:
                self._share(plan, answers)
        return self._launch(plan, preempted)

    def commit(
        self, step: Step, sampled: Mapping[str, int] | None = None, finished: Iterable[str] = (), failed: Iterable[str] = ()
    ) -> None:
        """Account for the oldest step in flight. sampled: the new token of each of `step.samples`; who `finished` or `failed` ends."""
        if not self._flights or self._flights[0].step is not step:
            raise RuntimeError(f"commit got step {step.number}, which is not the oldest in flight: commit steps in order")
        flight = self._flights.popleft()
        self._settled = False
        ended, lost = {*finished, *failed}, set(failed)
        for request_id, count in step.tokens.items():
            sequence = flight.sequences[request_id]
            sequence.in_flight -= 1
            if sequence.ended:
                continue
            if request_id not in lost:
                self.memory.commit(request_id, sequence.tokens[sequence.computed : sequence.computed + count])
                sequence.computed += count
                if request_id in step.samples:
                    sequence.tokens.append((sampled or {})[request_id])
                    sequence.pending -= 1
            if request_id in ended:
                self._end(sequence)
        self.memory.end_step(flight.memory_step)

    def live(self, step: Step) -> frozenset[str]:
        """The requests of a step in flight that have not ended since it was decided."""
        flight = next(flight for flight in self._flights if flight.step is step)
        return frozenset(request_id for request_id, sequence in flight.sequences.items() if not sequence.ended)

    def take_prefix_counts(self) -> tuple[int, int]:
        """Prompt tokens sought, and found, in the prefix cache since the last call."""
        counts = self._looked_up, self._found
        self._looked_up = self._found = 0
        return counts

    def check_integrity(self) -> None:
        """Raise RuntimeError if what is held does not add up. For idle moments: it looks at everything."""
        self.memory.check_integrity()
        for sequence in self._waiting:
            if sequence.scheduled or sequence.pending or sequence.ended:
                raise RuntimeError(f"{sequence.request_id} waits, but has {sequence.scheduled} tokens scheduled")
        for sequence in self._running.values():
            flying = sum(flight.step.tokens.get(sequence.request_id, 0) for flight in self._flights)
            if sequence.computed + flying != sequence.scheduled:
                raise RuntimeError(f"{sequence.request_id}: {sequence.computed} computed + {flying} in flight, not {sequence.scheduled}")

    def _launch(self, plan: _Plan, preempted: list[str]) -> Step:
        if not plan.counts:
            self._settled = not preempted
            return Step(self._step_number, {}, {}, {}, frozenset(), {}, tuple(preempted), ())
        starts = {request_id: sequence.scheduled for request_id, sequence in plan.order.items()}
        taken = {request_id: plan.order[request_id].take(count) for request_id, count in plan.counts.items()}
        memory_step = self.memory.begin_step(tuple(plan.counts))
        step = Step(
            number=self._step_number,
            tokens=plan.counts,
            starts=starts,
            inputs={request_id: inputs for request_id, (inputs, _) in taken.items()},
            samples=frozenset(request_id for request_id, (_, samples) in taken.items() if samples),
            tables={request_id: _copy(self.memory.table(request_id)) for request_id in plan.counts},
            preempted=tuple(preempted),
            transfers=self.memory.take_transfers(),
        )
        self._step_number += 1
        self._flights.append(_Flight(step, plan.order, memory_step))
        return step

    def _hold_memory(self, preempted: list[str]) -> list[SequenceState]:
        """Take memory for all that running requests know, the best of them first; returns those that have it."""
        ready: list[SequenceState] = []
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.rank):
            if sequence.request_id not in self._running or sequence.missing == 0:
                continue
            while (room := self.memory.reserve(sequence.request_id, sequence.known)) is Room.NONE:
                if self._flights:
                    self._emptying = True
                    break
                victim = max(self._running.values(), key=lambda one: one.rank)
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is sequence:
                    break
            if room is Room.READY:
                ready.append(sequence)
        return [sequence for sequence in ready if sequence.request_id in self._running]

    def _share(self, plan: _Plan, sequences: Iterable[SequenceState]) -> None:
        """Give the budget out in order, until one gets nothing."""
        for sequence in sequences:
            if sequence.request_id not in self._running:
                continue
            count = self._portion(plan, sequence)
            if count == 0:
                return
            self._put(plan, sequence, count)

    def _portion(self, plan: _Plan, sequence: SequenceState) -> int:
        """Tokens of `sequence` that the step still takes. Without chunks, only a prompt beyond any step's budget is divided, and alone."""
        missing = sequence.missing
        if self.policy.chunked_prefill or missing <= plan.budget:
            return min(missing, plan.budget)
        return plan.budget if missing > self.limits.max_num_batched_tokens and not plan.prefilled else 0

    def _put(self, plan: _Plan, sequence: SequenceState, count: int) -> None:
        plan.order[sequence.request_id] = sequence
        plan.counts[sequence.request_id] = count
        plan.budget -= count
        plan.prefilled = plan.prefilled or sequence.prefills

    def _admit(self, plan: _Plan, preempted: list[str]) -> None:
        """Start requests that wait, in their order: none overtakes one that does not fit."""
        memory = self.memory
        while plan.budget and not self._emptying:
            sequence = self._waiting.first(self._step_number)
            if sequence is None:
                return
            request_id = sequence.request_id
            if len(self._running) < self.limits.max_num_sequences and self._has_memory(sequence):
                expected = sequence.prompt_tokens + sequence.max_tokens if self.policy.continuous_memory else 0
                sequence.scheduled = sequence.computed = memory.admit(request_id, sequence.tokens, sequence.scope, expected_tokens=expected)
                count = self._portion(plan, sequence)
                held = memory.reserve(request_id, sequence.known) is Room.READY
                if held and count:
                    self._start(sequence, count, plan)
                    continue
                memory.free(request_id)
                sequence.restart()
                if held:
                    return
                self._refused = (request_id, memory.free_pages)
            if not self._make_room(sequence, plan, preempted):
                return

    def _start(self, sequence: SequenceState, count: int, plan: _Plan) -> None:
        if not sequence.started:
            self._looked_up += sequence.prompt_tokens
            self._found += sequence.computed
        sequence.started = True
        sequence.protected = sequence.protected or self._waiting.starving(self._step_number) is sequence
        self._waiting.remove(sequence.request_id)
        self._running[sequence.request_id] = sequence
        self._put(plan, sequence, count)

    def _has_memory(self, sequence: SequenceState) -> bool:
        """Whether a request that waits may start: now, and if preemption is conservative, to its end."""
        layout = self.memory.layout
        if self.policy.preemption is Preemption.CONSERVATIVE:
            promised = sum(layout.pages_for(one.prompt_tokens + one.max_tokens) for one in self._running.values())
            if promised + layout.pages_for(sequence.prompt_tokens + sequence.max_tokens) > layout.page_count:
                return False
        if self._refused is not None and self._refused[0] == sequence.request_id and self.memory.free_pages <= self._refused[1]:
            return False
        if self._pages_short(sequence) > 0:
            self._refused = (sequence.request_id, self.memory.free_pages)
            return False
        return True

    def _pages_short(self, sequence: SequenceState) -> int:
        """Pages that a request lacks to start, at least: those that it would share may be among the free ones."""
        layout = self.memory.layout
        spare = int(layout.page_count * WATERMARK) if self._running else 0
        shared = self.memory.match(sequence.tokens, sequence.scope).device_tokens // layout.page_tokens
        return layout.pages_for(sequence.known) - shared + spare - self.memory.free_pages

    def _make_room(self, newcomer: SequenceState, plan: _Plan, preempted: list[str]) -> bool:
        """Let running requests yield to one that never ran. False if that is not wanted, not enough, or must wait for steps in flight."""
        if self.policy.preemption is not Preemption.AGGRESSIVE or newcomer.started:
            return False
        layout = self.memory.layout
        short = self._pages_short(newcomer) - self.memory.fenced_pages
        seats = len(self._running) + 1 - self.limits.max_num_sequences
        victims: list[SequenceState] = []
        # Who has had most of its answer feels a pause least.
        for one in sorted(self._running.values(), key=lambda one: (one.priority, one.known - one.prompt_tokens), reverse=True):
            if len(victims) >= seats and short <= 0:
                break
            if not (one.yielded or one.protected) and one.known > one.prompt_tokens and one.priority >= newcomer.priority:
                victims.append(one)
                short -= layout.pages_for(one.known)
        if not victims or len(victims) < seats or short > 0:
            return False
        if self._flights:
            self._emptying = True
            return False
        for victim in victims:
            plan.budget += plan.counts.pop(victim.request_id, 0)
            plan.order.pop(victim.request_id, None)
            victim.yielded = True
            self._preempt(victim)
            preempted.append(victim.request_id)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Nothing is in flight: its memory is free at once, and what the prefix cache keeps of it need not be computed again."""
        del self._running[sequence.request_id]
        self.memory.free(sequence.request_id)
        sequence.restart()
        self._waiting.push(sequence, self._step_number)

    def _end(self, sequence: SequenceState) -> None:
        sequence.ended = True
        del self._running[sequence.request_id]
        self.memory.free(sequence.request_id)


def _copy(table: HierarchicalBlockTable) -> HierarchicalBlockTable:
    copy = HierarchicalBlockTable(table.layout)
    copy.pages = list(table.pages)
    return copy
