"""Continuous batching: decides, step by step, how many tokens of which request are computed. Imports no torch.

A step mixes decoding (one token) and prefill (as many as the budget holds, so that a long prompt takes several steps). Requests
start first come, first served. KV blocks are taken as a sequence grows; when none is left, the newest request gives its blocks
back and is computed again later. The oldest is never preempted and every accepted request fits alone, so each one ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from npufleet_pod.errors import ContextLengthError, InvalidRequestError, QueueFullError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that every step keeps."""

    max_num_sequences: int
    max_num_batched_tokens: int
    max_queued_requests: int
    """Requests that may wait beyond those that the sequences take."""
    max_model_length: int
    kv_blocks: int
    kv_block_tokens: int

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens take."""
        return -(-tokens // self.kv_block_tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """One decision. `tokens` is in batch order; KV of `released` requests is to be freed before the step runs."""

    tokens: Mapping[str, int]
    released: tuple[str, ...]
    preempted: tuple[str, ...]


@dataclass(slots=True)
class _Entry:
    """A request: `known` tokens of prompt and answer, of which `computed` are in the KV cache."""

    request_id: str
    arrival: int
    known: int
    computed: int = 0
    blocks: int = 0
    cancelled: bool = False

    @property
    def missing(self) -> int:
        return self.known - self.computed


class Scheduler:
    """Holds waiting and running requests. Not thread-safe; one `schedule` is followed by one `commit` before the next."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._waiting: OrderedDict[str, _Entry] = OrderedDict()
        self._running: OrderedDict[str, _Entry] = OrderedDict()
        self._free_blocks = limits.kv_blocks
        self._released: list[str] = []
        self._step: Step | None = None
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for their first step, or again after a preemption."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return 1 - self._free_blocks / self.limits.kv_blocks

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has anything to say."""
        return bool(self._running or self._waiting or self._released)

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise InvalidRequestError if a request of this size can never be served."""
        limits = self.limits
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
        if limits.blocks_for(total) > limits.kv_blocks:
            raise ContextLengthError(
                f"prompt and answer take {prompt_tokens} + {max_tokens} tokens, this replica's memory holds "
                f"{limits.kv_blocks * limits.kv_block_tokens}: shorten the prompt or lower max_tokens",
                "max_tokens",
            )

    def check_room(self, requests: int) -> None:
        """Raise QueueFullError unless `requests` more can be taken."""
        limits = self.limits
        if self.running + self.waiting + requests > limits.max_num_sequences + limits.max_queued_requests:
            raise QueueFullError(f"{self.waiting} requests wait already, the limit is {limits.max_queued_requests}: try again later")

    def add(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Queue a request. Raises InvalidRequestError, or QueueFullError."""
        self.check(prompt_tokens, max_tokens)
        self.check_room(1)
        if request_id in self._waiting or request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id} is being served: send another id")
        self._waiting[request_id] = _Entry(request_id, self._arrivals, prompt_tokens)
        self._arrivals += 1

    def cancel(self, request_id: str) -> bool:
        """Give a request up wherever it is; False if it is unknown. Blocks of a step in flight are freed at its commit."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        entry = self._running.get(request_id)
        if entry is None or entry.cancelled:
            return False
        if self._step is not None and request_id in self._step.tokens:
            entry.cancelled = True
        else:
            self._release(self._running.pop(request_id))
        return True

    def schedule(self) -> Step:
        """Decide the next step."""
        if self._step is not None:
            raise RuntimeError("schedule was called before the last step was committed")
        tokens: dict[str, int] = {}
        preempted: list[str] = []
        budget = self.limits.max_num_batched_tokens
        for entry in sorted(self._running.values(), key=lambda entry: (entry.missing > 1, entry.arrival)):
            if budget == 0 or entry.request_id not in self._running:
                continue
            count = min(entry.missing, budget)
            while not self._grow(entry, count):
                victim = max(self._running.values(), key=lambda entry: entry.arrival)
                budget += tokens.pop(victim.request_id, 0)
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is entry:
                    break
            else:
                tokens[entry.request_id] = count
                budget -= count
        if not preempted:
            self._admit(tokens, budget)
        step = Step(tokens, tuple(self._released), tuple(preempted))
        self._released.clear()
        self._step = step if tokens else None
        return step

    def commit(self, step: Step, finished: Iterable[str] = (), failed: Iterable[str] = ()) -> None:
        """Account for a step that ran: each request whose tokens are all computed has one new token, unless it `finished` or `failed`."""
        if step is not self._step and step.tokens:
            raise RuntimeError("commit got another step than the one in flight")
        self._step = None
        ended = {*finished, *failed}
        for request_id, count in step.tokens.items():
            entry = self._running[request_id]
            entry.computed += count
            if entry.cancelled or request_id in ended:
                self._release(self._running.pop(request_id))
            elif entry.missing == 0:
                entry.known += 1

    def samples(self, step: Step) -> frozenset[str]:
        """The requests of `step` that get a new token, since it computes the last of those they have."""
        return frozenset(request_id for request_id, count in step.tokens.items() if self._running[request_id].missing == count)

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks were lost or counted twice."""
        held = sum(entry.blocks for entry in self._running.values())
        if held + self._free_blocks != self.limits.kv_blocks or self._free_blocks < 0 or any(e.blocks for e in self._waiting.values()):
            raise RuntimeError(f"KV blocks do not add up: {held} held, {self._free_blocks} free of {self.limits.kv_blocks}")

    def _admit(self, tokens: dict[str, int], budget: int) -> None:
        while budget and self._waiting and len(self._running) < self.limits.max_num_sequences:
            entry = next(iter(self._waiting.values()))
            if self.limits.blocks_for(entry.known) > self._free_blocks:
                return
            count = min(entry.missing, budget)
            self._grow(entry, count)
            self._running[entry.request_id] = self._waiting.pop(entry.request_id)
            tokens[entry.request_id] = count
            budget -= count

    def _grow(self, entry: _Entry, count: int) -> bool:
        more = self.limits.blocks_for(entry.computed + count) - entry.blocks
        if more > self._free_blocks:
            return False
        entry.blocks += max(more, 0)
        self._free_blocks -= max(more, 0)
        return True

    def _preempt(self, entry: _Entry) -> None:
        del self._running[entry.request_id]
        self._release(entry)
        entry.computed = 0
        self._waiting[entry.request_id] = entry
        self._waiting.move_to_end(entry.request_id, last=False)

    def _release(self, entry: _Entry) -> None:
        self._free_blocks += entry.blocks
        entry.blocks = 0
        self._released.append(entry.request_id)
