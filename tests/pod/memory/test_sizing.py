"""How much KV fits, from what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_pod.engine.memory.errors import OutOfMemoryError
from npufleet_pod.engine.memory.sizing import KVBudget, LinearBytes, StepMemory, kv_page_count


@pytest.mark.parametrize(
    ("small", "large", "number", "expected"),
    [
        ((16, 1600), (128, 12800), 1000, 100_000),
        ((16, 1700), (128, 12900), 1000, 100_100),
        ((1, 50), (8, 50), 64, 50),
        # Less for more is noise: the larger step's figure counts for all.
        ((1, 80), (8, 50), 64, 50),
        # More than in proportion is not less than nothing for nothing.
        ((1, 0), (2, 100), 3, 300),
    ],
)
def test_two_measurements_are_a_line(small: tuple[int, int], large: tuple[int, int], number: int, expected: int) -> None:
    line = LinearBytes.through(small, large)
    if line.constant:
        assert line.at(large[0]) == large[1]
    assert line.at(number) == expected or line.at(number) == large[1] + line.each * (number - large[0])


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(128, 1 << 20))
def test_a_larger_step_never_takes_less_than_the_largest_measured(small: int, large: int, number: int) -> None:
    line = LinearBytes.through((16, small), (128, large))
    assert line.constant >= 0
    assert line.each >= 0
    assert line.at(number) >= large - 1


def test_a_step_is_the_forward_pass_or_the_choice_of_tokens_after_it() -> None:
    memory = StepMemory(LinearBytes(100, 10), attention_bytes=50, sampling=LinearBytes(0, 1000), hidden_bytes=4)
    assert memory.peak_bytes(1000, 1) == 100 + 10 * 1000 + 50
    assert memory.peak_bytes(1000, 64) == 64 * 1000 + 4 * 1000


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 38), st.floats(0.1, 1), st.floats(0, 1), st.integers(1, 1 << 24))
def test_what_is_allocated_fits_beside_a_step_and_what_it_gathers(
    free: int, step: int, share: float, gathered: float, page_bytes: int
) -> None:
    budget = KVBudget(free, step, share, gathered)
    pages = kv_page_count(budget, page_bytes, useful_pages=1 << 40, min_pages=0)
    if pages:
        assert pages * page_bytes * (1 + gathered) + step <= free
        assert budget.bytes_for(pages * page_bytes) <= free + 1
    assert budget.bytes_for((pages + 1) * page_bytes) >= min(free, budget.bytes_for(0)) - 1


def test_too_little_names_everything_that_takes_memory() -> None:
    with pytest.raises(OutOfMemoryError, match=r"3\.0 MiB are free, a step takes 2\.0 MiB of them and 2 pages 2\.0 MiB: raise the memory"):
        kv_page_count(KVBudget(3 << 20, 2 << 20, 1.0), 1 << 20, useful_pages=9, min_pages=2)
