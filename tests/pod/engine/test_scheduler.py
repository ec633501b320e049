from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npufleet_pod.engine.scheduler import Scheduler, SchedulerLimits, Step
from npufleet_pod.errors import ContextLengthError, InvalidRequestError, QueueFullError


def limits(**changes: int) -> SchedulerLimits:
    fields = {
        "max_num_sequences": 4,
        "max_num_batched_tokens": 16,
        "max_queued_requests": 8,
        "max_model_length": 64,
        "kv_blocks": 100,
        "kv_block_tokens": 4,
    }
    return SchedulerLimits(**{**fields, **changes})


def run_step(scheduler: Scheduler, finished: tuple[str, ...] = ()) -> Step:
    step = scheduler.schedule()
    scheduler.commit(step, finished)
    return step


def test_prefill_then_one_token_a_step() -> None:
    scheduler = Scheduler(limits())
    scheduler.add("a", 5, 3)
    assert [run_step(scheduler).tokens for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}]


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=4))
    scheduler.add("a", 10, 1)
    samples = []
    for expected in (4, 4, 2):
        step = scheduler.schedule()
        assert step.tokens == {"a": expected}
        samples.append(scheduler.samples(step))
        scheduler.commit(step)
    assert samples == [frozenset(), frozenset(), {"a"}]


def test_decoding_goes_before_prefill_so_that_a_long_prompt_does_not_stall_others() -> None:
    scheduler = Scheduler(limits(max_num_batched_tokens=4))
    scheduler.add("long", 12, 1)
    scheduler.add("short", 1, 9)
    steps = [run_step(scheduler).tokens for _ in range(4)]
    assert steps == [{"long": 4}, {"long": 4}, {"long": 4}, {"long": 1, "short": 1}]
    scheduler.add("late", 20, 1)
    assert run_step(scheduler).tokens == {"long": 1, "short": 1, "late": 2}


def test_first_come_first_served_and_no_one_overtakes_a_request_that_does_not_fit() -> None:
    scheduler = Scheduler(limits(kv_blocks=4))
    scheduler.add("a", 8, 4)
    scheduler.add("big", 12, 4)
    scheduler.add("small", 1, 1)
    assert run_step(scheduler).tokens == {"a": 8}
    assert run_step(scheduler, ("a",)).tokens == {"a": 1}
    assert list(run_step(scheduler).tokens) == ["big", "small"]


def test_the_newest_request_gives_its_blocks_back_and_is_computed_again() -> None:
    scheduler = Scheduler(limits(kv_blocks=4))
    scheduler.add("old", 4, 12)
    scheduler.add("new", 8, 8)
    assert run_step(scheduler).tokens == {"old": 4, "new": 8}
    step = run_step(scheduler)
    assert (step.tokens, step.preempted) == ({"old": 1}, ("new",))
    assert scheduler.waiting == 1
    assert run_step(scheduler).released == ()
    for _ in range(2):
        run_step(scheduler)
    assert run_step(scheduler, ("old",)).tokens == {"old": 1}
    assert run_step(scheduler).tokens == {"new": 9}


@pytest.mark.parametrize(
    ("prompt", "answer", "error", "said"),
    [
        (0, 1, InvalidRequestError, "no tokens"),
        (1, 0, InvalidRequestError, "max_tokens is 0"),
        (60, 5, ContextLengthError, "60 \\+ 5 tokens, the model holds 64"),
        (30, 20, ContextLengthError, "memory holds 40"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt: int, answer: int, error: type[Exception], said: str) -> None:
    scheduler = Scheduler(limits(kv_blocks=10))
    with pytest.raises(error, match=said):
        scheduler.add("a", prompt, answer)
    assert not scheduler.has_work


def test_the_queue_is_bounded() -> None:
    scheduler = Scheduler(limits(max_num_sequences=1, max_queued_requests=2))
    for name in "abc":
        scheduler.add(name, 1, 1)
    with pytest.raises(QueueFullError, match="3 requests wait already, the limit is 2"):
        scheduler.add("d", 1, 1)


def test_blocks_of_a_request_cancelled_in_mid_step_are_freed_only_by_its_commit() -> None:
    scheduler = Scheduler(limits())
    scheduler.add("a", 4, 4)
    step = scheduler.schedule()
    assert scheduler.cancel("a")
    assert not scheduler.cancel("a")
    assert scheduler.kv_usage > 0
    scheduler.commit(step)
    assert scheduler.kv_usage == 0
    assert scheduler.schedule().released == ("a",)
    assert not scheduler.has_work


def test_a_second_schedule_before_the_commit_is_a_mistake() -> None:
    scheduler = Scheduler(limits())
    scheduler.add("a", 4, 4)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="before the last step was committed"):
        scheduler.schedule()


request_sizes = st.tuples(st.integers(1, 40), st.integers(1, 24))
actions = st.one_of(
    st.tuples(st.just("add"), request_sizes),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("cancel in flight"), st.integers(0, 30)),
)
some_limits = st.builds(
    SchedulerLimits,
    max_num_sequences=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 20),
    max_queued_requests=st.integers(0, 5),
    max_model_length=st.integers(16, 64),
    kv_blocks=st.integers(4, 24),
    kv_block_tokens=st.sampled_from([1, 4, 16]),
)


@settings(max_examples=150)
@given(some_limits, st.lists(actions, min_size=10, max_size=80))
def test_every_request_ends_exactly_once_and_every_bound_holds(bounds: SchedulerLimits, plan: list[tuple[str, Any]]) -> None:
    scheduler = Scheduler(bounds)
    left: dict[str, int] = {}
    computed: Counter[str] = Counter()
    known: dict[str, int] = {}
    ended: Counter[str] = Counter()
    added: list[str] = []

    def step(stop_early: bool = False, cancel: str | None = None) -> None:
        had_work = scheduler.has_work
        decision = scheduler.schedule()
        assert not had_work or decision.tokens or decision.released, "work, and nothing done about it"
        assert sum(decision.tokens.values()) <= bounds.max_num_batched_tokens
        assert scheduler.running <= bounds.max_num_sequences
        for name in (*decision.preempted, *decision.released):
            computed[name] = 0
        samples = scheduler.samples(decision)
        if cancel is not None and scheduler.cancel(cancel):
            ended[cancel] += 1
            left.pop(cancel)
        finished = []
        for name, count in decision.tokens.items():
            computed[name] += count
            assert computed[name] <= known[name], "tokens computed that are not there"
            assert (name in samples) == (computed[name] == known[name])
            if name in samples and name in left:
                known[name] += 1
                left[name] -= 1
                if left[name] == 0 or stop_early:
                    finished.append(name)
        scheduler.commit(decision, finished)
        for name in finished:
            ended[name] += 1
            left.pop(name)
        scheduler.check_integrity()

    for action, argument in plan:
        if action == "add":
            prompt, answer = argument
            name = f"r{len(added)}"
            try:
                scheduler.add(name, prompt, answer)
            except (InvalidRequestError, QueueFullError):
                continue
            added.append(name)
            known[name], left[name] = prompt, answer
        elif action == "step":
            step(stop_early=bool(argument))
        else:
            name = f"r{argument}"
            if action == "cancel in flight":
                step(cancel=name)
            elif scheduler.cancel(name):
                ended[name] += 1
                left.pop(name)
        assert scheduler.running + scheduler.waiting <= bounds.max_num_sequences + bounds.max_queued_requests
        scheduler.check_integrity()

    most_steps = sum(known[name] + left[name] for name in left) * (bounds.max_num_sequences + bounds.max_queued_requests + 1) + 10
    for _ in range(most_steps):
        if not scheduler.has_work:
            break
        step()
    assert not scheduler.has_work, "requests that never end"
    assert ended == Counter(added)
    assert scheduler.kv_usage == 0
