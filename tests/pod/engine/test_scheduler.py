from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.engine.memory.layout import CacheScope, Load
from npufleet_pod.engine.step import FUTURE_TOKEN
from npufleet_pod.errors import ContextLengthError, InvalidRequestError, QueueFullError
from support.scheduling import AGGRESSIVE, CONSERVATIVE, THROUGHPUT, commit, host_tier, limits, new_scheduler, prompt, run_step


def test_prefill_then_one_token_a_step() -> None:
    scheduler = new_scheduler()
    scheduler.add("a", [5, 6, 7, 8, 9], 3)
    steps = [run_step(scheduler) for _ in range(3)]
    assert [step.tokens for step in steps] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert [step.starts["a"] for step in steps] == [0, 5, 6]
    assert [list(step.inputs["a"]) for step in steps] == [[5, 6, 7, 8, 9], [7], [7]]


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_after_the_last() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=4))
    scheduler.add("a", prompt(10), 1)
    steps = [run_step(scheduler) for _ in range(3)]
    assert [step.tokens for step in steps] == [{"a": 4}, {"a": 4}, {"a": 2}]
    assert [step.samples for step in steps] == [frozenset(), frozenset(), {"a"}]


def test_a_chunk_that_ends_one_token_before_the_prompt_samples_nothing() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=4))
    scheduler.add("a", prompt(5), 1)
    assert [run_step(scheduler).samples for _ in range(2)] == [frozenset(), {"a"}]


def test_decoding_goes_before_prefill_so_that_a_long_prompt_does_not_stall_others() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=4))
    scheduler.add("long", prompt(12), 9)
    scheduler.add("short", prompt(1), 9)
    steps = [run_step(scheduler).tokens for _ in range(4)]
    assert steps == [{"long": 4}, {"long": 4}, {"long": 4}, {"long": 1, "short": 1}]
    scheduler.add("late", prompt(20), 1)
    assert run_step(scheduler).tokens == {"long": 1, "short": 1, "late": 2}


def test_for_throughput_prompts_go_first() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=4), policy=THROUGHPUT)
    scheduler.add("a", prompt(1), 9)
    run_step(scheduler)
    scheduler.add("b", prompt(7), 9)
    assert [run_step(scheduler).tokens for _ in range(3)] == [{"b": 4}, {"b": 3, "a": 1}, {"a": 1, "b": 1}]


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=10), chunked_prefill=False)
    scheduler.add("a", prompt(6), 9)
    scheduler.add("b", prompt(6), 9)
    scheduler.add("c", prompt(2), 9)
    assert [run_step(scheduler).tokens for _ in range(3)] == [{"a": 6}, {"b": 6, "c": 2, "a": 1}, {"a": 1, "b": 1, "c": 1}]


def test_without_chunks_a_prompt_longer_than_any_step_is_divided_and_has_steps_of_its_own() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=8), chunked_prefill=False)
    scheduler.add("a", prompt(2), 9)
    scheduler.add("long", prompt(20), 9)
    steps = [run_step(scheduler).tokens for _ in range(4)]
    assert steps == [{"a": 2}, {"long": 8}, {"long": 8}, {"long": 4, "a": 1}]


def test_first_come_first_served_and_no_one_overtakes_a_request_that_does_not_fit() -> None:
    scheduler = new_scheduler(limits(kv_blocks=4, max_num_batched_tokens=64), preemption=CONSERVATIVE)
    scheduler.add("a", prompt(32), 16)
    scheduler.add("big", prompt(48), 16)
    scheduler.add("small", prompt(1), 1)
    assert run_step(scheduler).tokens == {"a": 32}
    assert run_step(scheduler, "a").tokens == {"a": 1}
    assert list(run_step(scheduler).tokens) == ["big"]


def test_a_lower_priority_value_is_served_earlier() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1), preemption=CONSERVATIVE)
    for name, priority in (("a", 0), ("batch", 5), ("urgent", -1), ("b", 0)):
        scheduler.add(name, prompt(2), 1, priority=priority)
    assert [list(run_step(scheduler, name).tokens) for name in ("urgent", "a", "b", "batch")] == [["urgent"], ["a"], ["b"], ["batch"]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_requests_are_served_by_priority_and_then_by_arrival(priorities: list[int]) -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1), preemption=CONSERVATIVE)
    for number, priority in enumerate(priorities):
        scheduler.add(str(number), prompt(2), 1, priority=priority)
    served = []
    for _ in priorities:
        step = scheduler.schedule()
        served += [int(name) for name in step.tokens]
        commit(scheduler, step, *step.tokens)
    assert served == sorted(range(len(priorities)), key=lambda number: (priorities[number], number))


def test_whoever_waited_too_long_goes_before_every_priority() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1), preemption=CONSERVATIVE, starvation_steps=3)
    scheduler.add("batch", prompt(2), 1, priority=9)
    served: list[str] = []
    for number in range(5):
        scheduler.add(f"urgent{number}", prompt(2), 1)
        step = scheduler.schedule()
        served += step.tokens
        commit(scheduler, step, *step.tokens)
    assert served == ["urgent0", "urgent1", "urgent2", "batch", "urgent3"]


def test_whoever_waited_too_long_keeps_the_seat_against_newcomers() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1), starvation_steps=2)
    scheduler.add("running", prompt(2), 9, priority=-1)
    scheduler.add("batch", prompt(2), 9, priority=5)
    for _ in range(2):
        run_step(scheduler)
    assert run_step(scheduler, "running").tokens == {"running": 1}
    assert run_step(scheduler).tokens == {"batch": 2}
    scheduler.add("newcomer", prompt(2), 9)
    step = run_step(scheduler)
    assert (dict(step.tokens), step.preempted) == ({"batch": 1}, ())


def test_the_newest_request_gives_its_blocks_back_and_is_computed_again() -> None:
    scheduler = new_scheduler(limits(kv_blocks=4, max_num_batched_tokens=64))
    scheduler.add("old", prompt(16), 20)
    scheduler.add("new", prompt(32), 32)
    assert run_step(scheduler).tokens == {"old": 16, "new": 32}
    step = run_step(scheduler)
    assert (step.tokens, step.preempted) == ({"old": 1}, ("new",))
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    for _ in range(3):
        assert list(run_step(scheduler).tokens) == ["old"]
    assert run_step(scheduler, "old").tokens == {"old": 1}
    assert run_step(scheduler).tokens == {"new": 33}


def test_a_newcomer_takes_the_seat_of_who_has_had_most_and_that_only_once() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=2), preemption=AGGRESSIVE)
    scheduler.add("a", prompt(2), 30)
    run_step(scheduler)
    scheduler.add("b", prompt(2), 30)
    run_step(scheduler)
    scheduler.add("c", prompt(2), 30)
    step = run_step(scheduler)
    assert (dict(step.tokens), step.preempted) == ({"b": 1, "c": 2}, ("a",))
    scheduler.add("d", prompt(2), 30)
    assert run_step(scheduler).preempted == ("b",)
    scheduler.add("e", prompt(2), 30)
    assert run_step(scheduler).preempted == ("c",)
    # Newcomers go before those that made room for one; these wait for a seat and then keep it.
    run_step(scheduler, "d", "e")
    assert set(run_step(scheduler).tokens) == {"a", "b"}
    scheduler.add("f", prompt(2), 30)
    assert run_step(scheduler).preempted == ()


def test_a_newcomer_takes_no_seat_from_a_better_priority_or_from_who_has_no_token_yet() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1, max_num_batched_tokens=4))
    scheduler.add("a", prompt(12), 9, priority=1)
    run_step(scheduler)
    scheduler.add("b", prompt(2), 9, priority=1)
    assert run_step(scheduler).tokens == {"a": 4}
    assert run_step(scheduler).tokens == {"a": 4}
    step = run_step(scheduler)
    assert (dict(step.tokens), step.preempted) == ({"b": 2}, ("a",))
    scheduler.add("c", prompt(2), 9, priority=2)
    assert run_step(scheduler).tokens == {"b": 1}


def test_nobody_is_preempted_for_a_newcomer_that_would_not_fit_even_so() -> None:
    scheduler = new_scheduler(limits(kv_blocks=8, max_num_sequences=3, max_num_batched_tokens=64))
    scheduler.add("a", prompt(48), 9)
    run_step(scheduler)
    scheduler.add("b", prompt(2), 9)
    run_step(scheduler)
    scheduler.add("urgent", prompt(32), 9, priority=-1)
    run_step(scheduler)
    scheduler.add("big", prompt(120), 2, priority=0)
    step = run_step(scheduler)
    assert step.preempted == ()
    assert set(step.tokens) == {"a", "b", "urgent"}


def test_conservative_admits_only_what_can_finish_and_preempts_nobody() -> None:
    scheduler = new_scheduler(limits(kv_blocks=8, max_num_batched_tokens=64), preemption=CONSERVATIVE)
    scheduler.add("a", prompt(16), 48)
    scheduler.add("b", prompt(16), 32)
    scheduler.add("c", prompt(16), 16)
    for _ in range(7):
        step = run_step(scheduler)
        assert (set(step.tokens), step.preempted) == ({"a", "b"}, ())
    assert set(run_step(scheduler, "b").tokens) == {"a", "b"}
    assert set(run_step(scheduler).tokens) == {"a", "c"}


def test_a_step_is_decided_before_the_tokens_of_the_one_before_are_known() -> None:
    scheduler = new_scheduler(steps_in_flight=2)
    scheduler.add("a", [5, 6], 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (dict(first.tokens), list(first.inputs["a"]), first.starts["a"]) == ({"a": 2}, [5, 6], 0)
    assert (dict(second.tokens), list(second.inputs["a"]), second.starts["a"]) == ({"a": 1}, [FUTURE_TOKEN], 2)
    assert not scheduler.has_work
    with pytest.raises(RuntimeError, match="while 2 steps are in flight"):
        scheduler.schedule()
    scheduler.commit(first, {"a": 50})
    third = scheduler.schedule()
    assert list(third.inputs["a"]) == [FUTURE_TOKEN]
    scheduler.commit(second, {"a": 51})
    # All tokens that were asked for are in flight: nothing more is decided.
    assert scheduler.schedule().tokens == {}
    assert not scheduler.has_work
    scheduler.commit(third, {"a": 52}, ["a"])
    assert scheduler.idle
    assert scheduler.kv_usage == 0
    scheduler.check_integrity()


def test_steps_are_committed_in_order() -> None:
    scheduler = new_scheduler(steps_in_flight=2)
    scheduler.add("a", [5, 6], 3)
    _, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.commit(second, {"a": 1})


def test_a_request_that_ended_early_leaves_the_steps_that_were_decided_ahead() -> None:
    scheduler = new_scheduler(steps_in_flight=3)
    scheduler.add("a", [5, 6], 30)
    steps = [scheduler.schedule() for _ in range(3)]
    scheduler.commit(steps[0], {"a": 1}, ["a"])
    assert scheduler.live(steps[1]) == frozenset()
    assert (scheduler.running, scheduler.idle) == (0, False)
    commit(scheduler, steps[1])
    commit(scheduler, steps[2])
    assert scheduler.idle
    scheduler.check_integrity()


def test_an_id_is_free_again_only_when_no_step_holds_it() -> None:
    scheduler = new_scheduler(steps_in_flight=2)
    scheduler.add("a", [5, 6], 30)
    step = scheduler.schedule()
    scheduler.cancel("a")
    with pytest.raises(InvalidRequestError, match="a request with the id a is being served"):
        scheduler.add("a", [5], 1)
    commit(scheduler, step)
    scheduler.add("a", [5], 1)


@pytest.mark.parametrize(
    ("prompt_tokens", "answer", "error", "said"),
    [
        (0, 1, InvalidRequestError, "no tokens"),
        (1, 0, InvalidRequestError, "max_tokens is 0"),
        (250, 7, ContextLengthError, "250 \\+ 7 tokens, the model holds 256"),
        (150, 11, ContextLengthError, "memory holds 160"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(prompt_tokens: int, answer: int, error: type[Exception], said: str) -> None:
    scheduler = new_scheduler(limits(kv_blocks=10))
    with pytest.raises(error, match=said):
        scheduler.add("a", prompt(prompt_tokens), answer)
    assert scheduler.idle


def test_the_queue_is_bounded() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1, max_queued_requests=2))
    for name in "abc":
        scheduler.add(name, prompt(1), 1)
    with pytest.raises(QueueFullError, match="3 requests wait already, the limit is 2"):
        scheduler.add("d", prompt(1), 1)


def test_a_cancelled_request_is_gone_wherever_it_was() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1), preemption=CONSERVATIVE)
    scheduler.add("running", prompt(4), 4)
    scheduler.add("waiting", prompt(4), 4)
    step = scheduler.schedule()
    assert scheduler.cancel("waiting")
    assert scheduler.cancel("running")
    assert not scheduler.cancel("running")
    assert not scheduler.cancel("unknown")
    commit(scheduler, step)
    assert scheduler.idle
    scheduler.check_integrity()


def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed_again() -> None:
    scheduler = new_scheduler(limits(max_num_batched_tokens=256), prefix_cache=True)
    shared = prompt(48)
    scheduler.add("a", shared + prompt(10), 1)
    assert run_step(scheduler, "a").tokens == {"a": 58}
    scheduler.add("b", shared + prompt(3), 1)
    scheduler.add("c", shared, 1)
    step = run_step(scheduler, "b", "c")
    # Of a prompt that is cached whole, the last block is computed: something has to give the next token.
    assert (dict(step.tokens), dict(step.starts)) == ({"b": 3, "c": 16}, {"b": 48, "c": 32})
    assert scheduler.take_prefix_counts() == (58 + 51 + 48, 48 + 32)


def test_a_preempted_request_finds_most_of_its_own_kv_again() -> None:
    scheduler = new_scheduler(limits(max_num_sequences=1, max_num_batched_tokens=256), prefix_cache=True, starvation_steps=1)
    scheduler.add("a", prompt(100), 9)
    run_step(scheduler)
    scheduler.add("b", prompt(5), 1)
    assert run_step(scheduler, "b").preempted == ("a",)
    step = run_step(scheduler)
    assert (dict(step.tokens), step.starts["a"]) == ({"a": 5}, 96)
    assert scheduler.take_prefix_counts() == (105, 0), "only a first start is a query"


class TestReportedElsewhere:
    """Defects of other engines, each by its report."""

    def test_blocks_of_a_finished_request_are_not_reused_while_a_step_uses_them(self) -> None:
        """vllm-ascend #14055: finished or preempted requests can return KV blocks while an asynchronous step is still in flight."""
        scheduler = new_scheduler(limits(kv_blocks=4, max_num_batched_tokens=64), steps_in_flight=2)
        scheduler.add("a", prompt(48), 16)
        first, second = scheduler.schedule(), scheduler.schedule()
        used = set(scheduler.memory.table("a").pages)
        scheduler.add("b", prompt(48), 16)
        scheduler.commit(first, {"a": 1}, ["a"])
        assert scheduler.schedule().tokens == {}, "b can only start on pages that the second step still writes"
        commit(scheduler, second)
        assert dict(scheduler.schedule().tokens) == {"b": 48}
        assert used & set(scheduler.memory.table("b").pages)

    def test_a_shortage_preempts_one_request_and_not_all_while_frees_are_deferred(self) -> None:
        """vllm #49674: deferred KV block frees cause zero-progress preemption cascades; vllm-ascend #16315: thrashing."""
        scheduler = new_scheduler(limits(kv_blocks=12, max_num_batched_tokens=256), steps_in_flight=2)
        for name in "abcd":
            scheduler.add(name, prompt(47), 80)
        first, second = scheduler.schedule(), scheduler.schedule()
        assert set(second.tokens) == set("abcd")
        commit(scheduler, first)
        third = scheduler.schedule()
        assert third.preempted == (), "what would be given back is still written by a step in flight"
        commit(scheduler, second)
        commit(scheduler, third)
        step = scheduler.schedule()
        assert step.preempted == ("d",)
        assert set(step.tokens) == set("abc")

    def test_a_request_longer_than_the_memory_does_not_block_the_queue_for_ever(self) -> None:
        """vllm #39734: scheduler deadlocks when a request exceeds KV cache capacity but is within max_model_len."""
        scheduler = new_scheduler(limits(kv_blocks=4))
        with pytest.raises(ContextLengthError, match="this replica's memory holds 64"):
            scheduler.add("never", prompt(60), 8)
        scheduler.add("next", prompt(2), 1)
        assert run_step(scheduler).tokens == {"next": 2}

    def test_pages_of_a_request_cancelled_while_they_are_loaded_come_back(self) -> None:
        """vllm-ascend #16662: KV blocks leak when a request is aborted during an asynchronous KV-pool load."""
        bounds = limits(kv_blocks=4, max_num_batched_tokens=64)
        scheduler = new_scheduler(bounds, prefix_cache=True, host=host_tier(bounds.layout, 8))
        first = prompt(48)
        for name, tokens in (("first", first), ("other", prompt(60))):
            scheduler.add(name, tokens, 1)
            run_step(scheduler, name)
        scheduler.add("again", first, 4)
        step = scheduler.schedule()
        assert any(isinstance(transfer, Load) for transfer in step.transfers)
        assert scheduler.cancel("again")
        commit(scheduler, step)
        assert (scheduler.kv_usage, scheduler.idle) == (0, True)
        scheduler.check_integrity()
        scheduler.add("whole", prompt(60), 4)
        assert dict(run_step(scheduler).tokens) == {"whole": 60}

    def test_an_adapter_and_a_salt_of_the_same_name_do_not_share_kv(self) -> None:
        """vllm #44701: prefix-cache extra-key domain collision between LoRA name and cache_salt."""
        scheduler = new_scheduler(limits(max_num_batched_tokens=64), prefix_cache=True)
        tokens = prompt(40)
        counts = []
        for name, scope in (("a", CacheScope(adapter="x")), ("b", CacheScope(salt="x")), ("c", CacheScope()), ("d", CacheScope(salt="x"))):
            scheduler.add(name, tokens, 1, scope=scope)
            counts.append(run_step(scheduler, name).tokens[name])
        assert counts == [40, 40, 40, 8]

    def test_a_queued_request_whose_client_left_never_runs(self) -> None:
        """llama.cpp #13262: server does not always cancel requests for disconnected connections."""
        scheduler = new_scheduler(limits(max_num_sequences=1), preemption=CONSERVATIVE)
        scheduler.add("a", prompt(2), 5)
        scheduler.add("left", prompt(2), 5)
        run_step(scheduler)
        scheduler.cancel("left")
        seen = [name for _ in range(4) for name in run_step(scheduler).tokens]
        assert seen == ["a"] * 4
