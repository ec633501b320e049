"""Random lives of a scheduler: requests come, go, end early and fail while several steps are in flight.

Steps are carried out on a model of the device's memory, in which every slot holds a digest of the whole text up to its token. So each
step can tell whether what it would read is there, whoever wrote it and wherever it was moved since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from npufleet_pod.engine.memory.layout import CacheScope
from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits
from npufleet_pod.engine.step import FUTURE_TOKEN, Step
from npufleet_pod.errors import InvalidRequestError, QueueFullError
from support.scheduling import AGGRESSIVE, CONSERVATIVE, LATENCY, THROUGHPUT, DeviceModel, host_tier, new_scheduler


def digests(text: Sequence[int]) -> list[int]:
    """Of every beginning of a text."""
    seen: list[int] = []
    for token in text:
        seen.append(hash((seen[-1] if seen else None, token)))
    return seen


def next_token(text: Sequence[int]) -> int:
    """The model: what follows a text."""
    return digests(text)[-1] % 3


@dataclass
class Flight:
    step: Step

    sampled: dict[str, int] | None = None


bounds = st.builds(
    SchedulerLimits,
    max_num_sequences=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 90),
    max_queued_requests=st.integers(0, 5),
    max_model_length=st.integers(16, 200),
    kv_blocks=st.integers(4, 24),
    kv_block_tokens=st.sampled_from([16, 16, 32]),
    kv_page_blocks=st.sampled_from([1, 1, 2]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, cancels, decides, computes and commits in any order that the engine allows."""

    @initialize(
        limits=bounds,
        chunked=st.booleans(),
        preemption=st.sampled_from([AGGRESSIVE, CONSERVATIVE]),
        policy=st.sampled_from([LATENCY, THROUGHPUT]),
        starvation_steps=st.integers(1, 20),
        depth=st.integers(1, 4),
        prefix_cache=st.booleans(),
        host_pages=st.sampled_from([0, 3, 12]),
        disk_pages=st.sampled_from([0, 4, 50]),
    )
    def begin(
        self,
        limits: SchedulerLimits,
        chunked: bool,
        preemption: Any,
        policy: Any,
        starvation_steps: int,
        depth: int,
        prefix_cache: bool,
        host_pages: int,
        disk_pages: int,
    ) -> None:
        host = host_tier(limits.layout, host_pages)
        self.limits, self.preemption = limits, preemption
        self.scheduler: Scheduler = new_scheduler(
            limits,
            chunked_prefill=chunked,
            preemption=preemption,
            policy=policy,
            starvation_steps=starvation_steps,
            steps_in_flight=depth,
            prefix_cache=prefix_cache,
            host=host,
            disk_pages=disk_pages,
        )
        self.device = DeviceModel(limits.layout, host)
        self.flights: deque[Flight] = deque()
        self.texts: dict[str, list[int]] = {}
        """Prompt and answer of each request that has not ended, as far as computed."""
        self.left: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.added = 0

    @rule(
        shared=st.integers(0, 5),
        own=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        answer=st.integers(1, 40),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "other"]),
    )
    def add(self, shared: int, own: list[int], answer: int, priority: int, salt: str) -> None:
        prompt = [index % 3 for index in range(16 * shared)] + own
        name = f"r{self.added}"
        try:
            self.scheduler.add(name, prompt, answer, priority=priority, scope=CacheScope(salt=salt))
        except (InvalidRequestError, QueueFullError):
            return
        self.added += 1
        self.texts[name], self.left[name] = prompt, answer

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.left)))
        assert self.scheduler.cancel(name)
        self.end(name)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def schedule(self) -> None:
        idle_before = not self.flights
        step = self.scheduler.schedule()
        assert sum(step.tokens.values()) <= self.limits.max_num_batched_tokens
        assert self.scheduler.running <= self.limits.max_num_sequences
        assert self.preemption is AGGRESSIVE or not step.preempted
        assert not (step.preempted and self.flights), "memory was taken from requests that steps in flight use"
        assert step.tokens or step.preempted or not idle_before, "work, nothing in flight, and nothing done about it"
        if step.tokens:
            self.flights.append(Flight(step))

    @precondition(lambda self: any(flight.sampled is None for flight in self.flights))
    @rule()
    def compute(self) -> None:
        """Carry the oldest step that has not been computed out."""
        flight = next(flight for flight in self.flights if flight.sampled is None)
        step = flight.step
        self.device.execute(step.transfers)
        flight.sampled = {}
        for name, count in step.tokens.items():
            start, pages = step.starts[name], step.tables[name].pages
            if name not in self.left:
                # It ended: what is written for it must hurt nobody, which the others' reads tell.
                self.device.write(pages, start, [-1] * count)
                continue
            text = self.texts[name]
            inputs = list(step.inputs[name])
            if inputs[-1] == FUTURE_TOKEN:
                inputs[-1] = text[start + count - 1]
            assert inputs == text[start : start + count]
            seen = digests(text)
            assert self.device.read(pages, start) == seen[:start], f"{name} would read what is not its own"
            self.device.write(pages, start, seen[start : start + count])
            assert (name in step.samples) == (start + count == len(text))
            if name in step.samples:
                flight.sampled[name] = next_token(text)
                text.append(flight.sampled[name])

    @precondition(lambda self: self.flights and self.flights[0].sampled is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        fails = data.draw(st.integers(0, 9)) == 9
        self.finish_oldest(fails, lambda: data.draw(st.integers(0, 7)) == 7)

    def finish_oldest(self, fails: bool = False, stops: Callable[[], bool] = lambda: False) -> None:
        flight = self.flights.popleft()
        step, sampled = flight.step, flight.sampled or {}
        live = sorted(self.scheduler.live(step))
        assert live == sorted(name for name in step.tokens if name in self.left)
        ended = live if fails else []
        for name in [] if fails else live:
            if name in step.samples:
                self.left[name] -= 1
                assert self.left[name] >= 0, "more tokens than were asked for"
                if self.left[name] == 0 or stops():
                    ended.append(name)
        self.scheduler.commit(step, sampled, () if fails else ended, failed=step.tokens if fails else ())
        for name in ended:
            self.end(name)

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.running + self.scheduler.waiting == len(self.left)
        assert self.scheduler.running + self.scheduler.waiting <= self.limits.max_num_sequences + self.limits.max_queued_requests

    def end(self, name: str) -> None:
        self.ended[name] += 1
        del self.left[name], self.texts[name]

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20000):
            if any(flight.sampled is None for flight in self.flights):
                self.compute()
            elif self.flights:
                self.finish_oldest()
            elif self.scheduler.has_work:
                self.schedule()
            else:
                break
        assert self.scheduler.idle, "requests that never end"
        assert set(self.ended.values()) <= {1}
        assert len(self.ended) == self.added
        assert self.scheduler.kv_usage == 0
        self.scheduler.check_integrity()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
