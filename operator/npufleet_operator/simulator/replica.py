"""One replica: continuous batching with chunked prefill, step by step, in simulated time.

What is kept of the engine's scheduler: a bound on sequences and on tokens of a step, first come first served, next tokens before
prompts, prompts in chunks where the profile allows it, memory reserved for the whole request before it starts (so nothing is preempted),
a bounded queue, drain. What is left out: prefix cache, tiers, priorities, preemption.

Steps without prompts are taken together up to the next end of a sequence; an arrival that can start cuts them at the next step. Their
time grows linearly with the context, so taking them together changes no time but by the rounding at the roofline's knee.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil

from npufleet_api.slo import Outcome, SloTargets
from npufleet_api.traffic import TrafficWindow
from npufleet_operator.simulator.constants import MONITOR_WINDOW_SECONDS
from npufleet_operator.simulator.events import Clock
from npufleet_operator.simulator.request import Request
from npufleet_operator.simulator.roofline import Roofline, Work, decode, prefill

NO_TARGETS = SloTargets()
BURST_STEPS = 256
"""Most steps taken together, so that figures of a replica are never older than some seconds."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """What the model's profile allows."""

    max_sequences: int
    max_batched_tokens: int
    max_queued: int
    chunked_prefill: bool


@dataclass(slots=True)
class _Prompt:
    request: Request
    done: int = 0

    @property
    def left(self) -> int:
        return self.request.input_tokens - self.done


@dataclass(slots=True)
class _Burst:
    """Steps under way. `chunks` says how many tokens of which prompt the one step computes; without any, only next tokens are."""

    start: float
    steps: int
    seconds: float
    """Of all steps together."""
    compute_seconds: float
    chunks: list[tuple[_Prompt, int]] = field(default_factory=list)


@dataclass(slots=True)
class Totals:
    """What a replica has done since it started."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    busy_seconds: float = 0.0
    compute_seconds: float = 0.0


class Replica:
    """Takes requests while it is not draining; calls their `ended`."""

    def __init__(self, clock: Clock, roofline: Roofline, limits: ReplicaLimits, idle: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._roofline = roofline
        self._limits = limits
        self._idle = idle
        self._waiting: deque[Request] = deque()
        self._prompts: deque[_Prompt] = deque()
        self._decoding: list[tuple[int, int, Request]] = []
        """A heap by the step at which each sequence ends."""
        self._order = count()
        self._step = 0
        self._context = 0
        self._reserved = 0
        self._burst: _Burst | None = None
        self._token = 0
        self._between = False
        """Between two steps: a client that hears of its end may send the next request at once, and the next step has not begun."""
        self.totals = Totals()
        self.window = TrafficWindow(MONITOR_WINDOW_SECONDS, 12)
        self.draining = False
        self.dead = False

    @property
    def running(self) -> int:
        """Sequences that are being computed."""
        return len(self._prompts) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return self.running + self.waiting

    @property
    def kv_share(self) -> float:
        """Share of the KV memory that is reserved, 0 to 1."""
        return min(1.0, self._reserved / max(1, self._roofline.kv_tokens))

    def accept(self, request: Request) -> bool:
        """Take a request. False, and nothing done, if the queue is full or the replica drains. One that never fits ends at once."""
        if self.draining or self.dead or self.waiting >= self._limits.max_queued:
            return False
        if request.tokens > self._roofline.kv_tokens or (
            not self._limits.chunked_prefill and request.input_tokens > self._limits.max_batched_tokens
        ):
            request.end(Outcome.CLIENT_ERROR)
            return True
        self._waiting.append(request)
        if self._burst is None:
            if not self._between:
                self._begin()
        elif not self._burst.chunks and len(self._waiting) == 1 and self._may_start(request):
            self._cut(self._burst)
        return True

    def hand_back(self) -> None:
        """What waits goes elsewhere, as far as the replica drains; what has begun goes on."""
        if not self.draining or self.dead:
            return
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request.retry is None:
                self._waiting.append(request)
            else:
                request.retry(request)
        if not self.outstanding:
            self._idle()

    def stop(self) -> None:
        """The process ends: what waits for its first token goes elsewhere, streams that have begun are interrupted."""
        self._settle()
        self.dead = True
        self._token += 1
        left = [
            *self._waiting,
            *(prompt.request for prompt in self._prompts),
            *(r for _, _, r in sorted(self._decoding, key=lambda d: d[:2])),
        ]
        self._waiting.clear()
        self._prompts.clear()
        self._decoding.clear()
        for request in left:
            if request.first_token is None and request.retry is not None:
                request.retry(request)
            else:
                request.end(Outcome.INTERRUPTED)

    def _settle(self) -> None:
        """Account for what a burst that is broken off has computed."""
        burst = self._burst
        if burst is None:
            return
        share = min(1.0, (self._clock.now - burst.start) / burst.seconds)
        self.totals.busy_seconds += burst.seconds * share
        self.totals.compute_seconds += burst.compute_seconds * share
        self.totals.generation_tokens += int(burst.steps * share) * len(self._decoding)
        self._burst = None

    def _may_start(self, request: Request) -> bool:
        return self.running < self._limits.max_sequences and self._reserved + request.tokens <= self._roofline.kv_tokens

    def _begin(self) -> None:
        """Start the next step or steps; rest when there is nothing to do."""
        while self._waiting and self._may_start(self._waiting[0]):
            request = self._waiting.popleft()
            self._reserved += request.tokens
            self._prompts.append(_Prompt(request))
        if not self.running:
            self._burst = None
            self._idle()
            return
        chunks = self._chunks()
        sequences = len(self._decoding)
        if chunks:
            work = decode(sequences, self._context)
            for prompt, tokens in chunks:
                part = prefill(prompt.done, tokens)
                work = Work(work.tokens + part.tokens, work.pairs + part.pairs, work.context + part.context)
            burst = _Burst(self._clock.now, 1, self._roofline.step_seconds(work), self._roofline.compute_seconds(work), chunks)
        else:
            steps = min(BURST_STEPS, self._decoding[0][0] - self._step)
            first = decode(sequences, self._context)
            last = decode(sequences, self._context + (steps - 1) * sequences)
            seconds = steps * (self._roofline.step_seconds(first) + self._roofline.step_seconds(last)) / 2
            compute = steps * (self._roofline.compute_seconds(first) + self._roofline.compute_seconds(last)) / 2
            burst = _Burst(self._clock.now, steps, seconds, compute)
        self._schedule(burst)

    def _chunks(self) -> list[tuple[_Prompt, int]]:
        budget = self._limits.max_batched_tokens - len(self._decoding)
        chunks: list[tuple[_Prompt, int]] = []
        for prompt in self._prompts:
            if budget <= 0 or (not self._limits.chunked_prefill and chunks and prompt.left > budget):
                break
            tokens = min(prompt.left, budget) if self._limits.chunked_prefill else prompt.left
            chunks.append((prompt, tokens))
            budget -= tokens
        return chunks

    def _schedule(self, burst: _Burst) -> None:
        self._burst = burst
        self._token += 1
        token = self._token
        self._clock.at(burst.start + burst.seconds, lambda: self._finish(token))

    def _cut(self, burst: _Burst) -> None:
        """End the steps under way at the next step's end."""
        each = burst.seconds / burst.steps
        steps = max(1, ceil((self._clock.now - burst.start) / each - 1e-9))
        if steps < burst.steps:
            self._schedule(_Burst(burst.start, steps, steps * each, burst.compute_seconds * steps / burst.steps))

    def _finish(self, token: int) -> None:
        burst = self._burst
        if token != self._token or burst is None:
            return
        now = self._clock.now
        sequences = len(self._decoding)
        self._burst = None
        self._step += burst.steps
        self._context += burst.steps * sequences
        self.totals.busy_seconds += burst.seconds
        self.totals.compute_seconds += burst.compute_seconds
        self.totals.generation_tokens += burst.steps * sequences
        ended: list[Request] = []
        while self._decoding and self._decoding[0][0] <= self._step:
            _, _, request = heapq.heappop(self._decoding)
            self._context -= request.tokens
            ended.append(request)
        for prompt, tokens in burst.chunks:
            prompt.done += tokens
            self.totals.prompt_tokens += tokens
            if prompt.left == 0:
                self._prompts.remove(prompt)
                self._first_token(prompt.request, ended)
        for request in ended:
            self._reserved -= request.tokens
        self._between = True
        for request in ended:
            request.end(Outcome.OK)
            self.window.record(request.exchange(now), NO_TARGETS, now)
        self._between = False
        if not self.dead:
            self._begin()

    def _first_token(self, request: Request, ended: list[Request]) -> None:
        request.first_token = self._clock.now
        self.totals.generation_tokens += 1
        if request.output_tokens <= 1:
            ended.append(request)
            return
        # Its context is the prompt and the first token; it ends after the other tokens, each of which adds one.
        self._context += request.input_tokens + 1
        heapq.heappush(self._decoding, (self._step + request.output_tokens - 1, next(self._order), request))
