"""What a request costs where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npufleet_gateway.prediction import (
    DEFAULT_PREFILL_SECONDS_PER_TOKEN,
    DEFAULT_TPOT_SECONDS,
    REPORT_TRUST_SECONDS,
    Speed,
    Speeds,
    cost_seconds,
    known_speeds,
    levelled,
    trust,
)

amounts = st.floats(0, 10**6)


def test_trust_falls_with_age_and_is_never_negative() -> None:
    assert trust(0) == 1
    assert trust(REPORT_TRUST_SECONDS / 2) == pytest.approx(0.5)
    assert trust(REPORT_TRUST_SECONDS) == trust(10**9) == 0
    assert trust(-5) == 1


def test_the_first_known_speed_counts_and_each_by_itself() -> None:
    assert known_speeds([Speeds(prefill=1), Speeds(prefill=2, tpot=3), Speeds(tpot=4)]) == (1, 3)
    assert known_speeds([]) == (DEFAULT_PREFILL_SECONDS_PER_TOKEN, DEFAULT_TPOT_SECONDS)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([None, None], [7, 7]),
        ([2.0, None], [2, 2]),
        ([2.0, 2.2, 1.9], [2, 2, 2]),
        ([2.0, 2.0, 8.0, None], [2, 2, 8, 2]),
        ([1.0, 4.0], [1, 4]),
    ],
)
def test_who_was_not_measured_is_taken_for_the_others_and_small_differences_for_none(
    values: list[float | None], found: list[float]
) -> None:
    assert levelled(values, 7) == found


def test_a_speed_follows_what_is_measured_and_long_prompts_count_for_more() -> None:
    speed = Speed()
    assert speed.value is None
    speed.observe(-1, 10)
    speed.observe(1, 0)
    assert speed.value is None
    for _ in range(100):
        speed.observe(1, 1000)
    speed.observe(0.5, 10)
    assert speed.value == pytest.approx(1 / 1000, rel=0.05)
    for _ in range(400):
        speed.observe(4, 1000)
    assert speed.value == pytest.approx(4 / 1000, rel=0.05)


@given(amounts, amounts, st.floats(0, 50), st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(0, 1000))
def test_more_of_anything_never_costs_less(ahead: float, new: float, held: float, prefill: float, tpot: float, more: float) -> None:
    cost = cost_seconds(ahead, new, held, prefill, tpot)
    assert cost_seconds(ahead + more, new, held, prefill, tpot) >= cost
    assert cost_seconds(ahead, new + more, held, prefill, tpot) >= cost
    assert cost_seconds(ahead, new, held + more, prefill, tpot) >= cost
    assert cost_seconds(ahead, new, held, prefill + more, tpot) >= cost
